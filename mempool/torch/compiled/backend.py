"""The backend of `torch.compile` that keeps a step within a limit.

    model = torch.compile(model, backend="mempool", options={"limit": "12GiB"})

PyTorch finds the backend by the entry point of the installed package; `register` adds the name where there is
no entry point, such as in a source tree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mempool.errors import UsageError
from mempool.torch.compiled.options import parse_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from mempool.torch.compiled.partition import Partition


def mempool(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs.

    Args:
        graph: the graph from Dynamo.
        inputs: fake tensors and numbers.
        options: see `mempool.torch.compiled.options.Options`.
        mode: not supported.

    Raises:
        UsageError: the options are invalid.
        PlanError: the limit is infeasible; the error names the least feasible limit and the cause.
    """
    from mempool.torch.compiled.costs import cublas_workspace_bytes
    from mempool.torch.compiled.dynamo import (
        continues_after,
        current_code,
        graph_inputs,
        guard_dynamic_sizes,
        reachable_modules,
        refusal,
        warn_before_recompile_limit,
    )
    from mempool.torch.compiled.partition import Partition
    from mempool.torch.compiled.shared_limit import shared_limit_of
    from solvers.errors import PlanError

    try:
        chosen = parse_options(options, mode)
    except UsageError as error:
        raise refusal(error) from None
    shared_limit, given = shared_limit_of(options), graph_inputs(graph, inputs)
    observer, live_memory = shared_limit.observer, shared_limit.observer.live_memory
    live_memory.register(reachable_modules(), given)
    number = observer.number(current_code(), given)
    more = continues_after(graph) or observer.has_successor(number)
    external = live_memory.external(number, given, more=more)
    if chosen.limit is not None and live_memory.device is not None:
        external = replace(external, library=cublas_workspace_bytes(live_memory.device))
    partition = Partition(chosen, shared_limit, number, more, len(given), external)
    compile_with = _inductor if chosen.fused else _eager
    try:
        run = compile_with(graph, inputs, partition)
    except PlanError as error:
        raise refusal(error) from None
    if chosen.limit is not None and (compiled := partition.guard.compiled) is not None:
        warn_before_recompile_limit()
        guard_dynamic_sizes(inputs, compiled)
    return run


def register() -> None:
    """Register the backend's name with PyTorch."""
    from torch._dynamo.backends import registry

    if "mempool" not in registry.list_backends(exclude_tags=None):
        registry.register_backend(mempool)


def _eager(graph: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Prepare graphs to run without fusion, one operation at a time."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch import config

    from mempool.torch.compiled.partition import forward_peak, warn_above_limit

    def compile_with(graph: fx.GraphModule, inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        if (limit := partition.forward_only_limit) is not None:
            warn_above_limit(forward_peak(graph, partition.outside_bytes), limit)
        return partition.wrap(boxed_nop(graph, list(inputs)), inputs, backward=backward)

    with config.patch(donated_buffer=False):  # no buffer is overwritten: a backward pass may run twice
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=partial(compile_with, backward=False),
            bw_compiler=partial(compile_with, backward=True),
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(graph, inputs)
    return compiled


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Compile graphs with inductor, PyTorch's own compiler."""
    from torch._functorch import config as functions
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    from mempool.torch.compiled.inductor.patches import CAN_RESTRICT_DONATED, exact_rounding, restrict_donated
    from mempool.torch.compiled.partition import forward_kernels, warn_above_limit

    def compile_with(graph: fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Any:
        backward = bool(given.get("is_backward"))
        kernels, limit = partition.passes.get(backward), partition.forward_only_limit
        if limit is not None:
            kernels = forward_kernels(graph, partition.outside_bytes, limit)
        places = partition.donated if backward and partition.options.limit is not None else None
        settings = {} if kernels is None else kernels.settings()
        with config.patch(settings), restrict_donated(places), exact_rounding():
            compiled_graph = compile_fx_inner(graph, inputs, **given)
        if limit is not None and kernels is not None:
            warn_above_limit(int(kernels.loads.max()), limit)
        if (
            run := getattr(compiled_graph, "current_callable", None)
        ) is not None:  # otherwise it is not measured
            compiled_graph.current_callable = partition.wrap(run, inputs, backward=backward)
        return compiled_graph

    # Caches are off, since decisions depend on more than the graph. Layout optimization is off: an offloaded
    # value would get another layout than a resident value, and results would differ in the last bits.
    # Precision casts are emulated: a low-precision value inside a fused kernel must equal the reloaded value.
    changes = {
        "emulate_precision_casts": True,
        "custom_partitioner_fn": _partitioner(partition),
        "fx_graph_cache": False,
        "layout_optimization": False,
    }
    if partition.options.limit is not None:
        # An offload may be the last reader of a buffer, and reuse would overwrite the buffer during the copy.
        # Besides, buffers kept for reuse are not counted.
        changes["allow_buffer_reuse"] = False
    may_write = bool(functions.donated_buffer) and CAN_RESTRICT_DONATED
    with functions.patch(enable_autograd_cache=False, donated_buffer=may_write):
        compiled: Callable[..., Any] = compile_fx(graph, inputs, compile_with, changes)
    return compiled


def _partitioner(partition: Partition) -> Any:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, joint: fx.GraphModule, inputs: Sequence[object], **given: Any) -> Any:
            return partition(joint, inputs, **given)

        def uuid(self) -> None:
            """Return None, since nothing is cached."""

    return Partitioner()
