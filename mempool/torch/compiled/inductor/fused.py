"""Count the memory of fused graphs, and find a decision with which the kernels hold a limit.

Inductor fuses many operations into one kernel. A value that is made and read inside one kernel never lies in
memory, and the inputs of a kernel stay until the kernel ends, so the peak differs from that of the
operations. Graphs are lowered here until the kernels and their order are known, and the bytes of these
kernels are counted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner

from mempool.torch.compiled.inductor.donated import donated, told
from mempool.torch.compiled.inductor.exact_rounding import as_written
from mempool.torch.compiled.inductor.kernels import passes_of
from mempool.torch.compiled.inductor.limit_search import Extreme, Look, ask
from mempool.torch.compiled.merged_graph import output_of
from mempool.torch.compiled.passes.apply import apply
from solvers.errors import PlanError
from solvers.rewriting.refinement import merge_shared_reloads

if TYPE_CHECKING:
    from mempool.torch.compiled.decide import Deciding
    from mempool.torch.compiled.decision import Decided
    from mempool.torch.compiled.inductor.limit_search import Asked
    from mempool.torch.compiled.merged_graph import Joined


@dataclass(frozen=True)
class Needed:
    """Bytes on the device for a step with fused operations.

    Attributes:
        forward_bytes: peak of the forward pass.
        backward_bytes: peak of the backward pass.
        kept_bytes: bytes when the backward pass begins, with outside bytes and incoming gradients.
        kernel: the operations of the kernel at the peak.
        small: true if kernels are kept small.
    """

    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    kernel: str
    small: bool

    @property
    def peak_bytes(self) -> int:
        """Return the peak of both passes."""
        return max(self.forward_bytes, self.backward_bytes)


def fitted(joined: Joined, deciding: Deciding, limit: int) -> tuple[Decided, list[Decided]]:
    """Return the decision with which the kernels hold the limit, and all decisions that were tried.

    A decision counts operations, not kernels. So other limits are asked for until the kernels fit.

    Args:
        joined: the graphs, which stay unchanged.
        deciding: the decisions about the graphs.
        limit: bytes.

    Raises:
        PlanError: not even the decision with the lowest peak of operations fits.
    """
    least = deciding.least()

    @cache
    def decided(asked: Asked) -> Decided:
        with contextlib.suppress(PlanError):  # the host is too small
            return deciding.extreme(asked) if isinstance(asked, Extreme) else deciding.within(asked)
        return decided(Extreme.NOTHING)

    @cache
    def look(asked: Asked, *, small: bool) -> Look[Decided]:
        operations = decided(asked)
        whole = deciding.terms.least or isinstance(asked, Extreme) or asked == least
        made, together = kernels(operations, small=small, whole=whole)
        rewriting = merge_shared_reloads(made.captured.graph, made.rewriting, together)
        if rewriting != made.rewriting:
            other, _ = kernels(deciding.of(rewriting), small=small, whole=whole)
            made = min(made, other, key=lambda one: (max(one.peak_bytes, limit), one.timed.seconds))
        loss = made.timed.seconds / made.plain.seconds - 1 if made.plain.seconds else 0.0
        return Look(made.peak_bytes, operations.timed.peak_bytes, loss, made)

    def kernels(made: Decided, *, small: bool, whole: bool) -> tuple[Decided, list[frozenset[int]]]:
        need, together = needed(joined, deciding, made, limit, small=small, whole=whole)
        looked.append(replace(made, needed=need))
        return looked[-1], together

    looked: list[Decided] = []
    found, holds = ask(limit, least, look)
    need = found.told.needed
    if not holds and need is not None:
        raise PlanError(
            f"no step fits in {limit} bytes: a kernel of fused operations ({need.kernel[:200]}) "
            f"needs {need.peak_bytes}",
            need.peak_bytes,
        )
    return found.told, looked


def needed(
    joined: Joined, deciding: Deciding, made: Decided, limit: int, *, small: bool, whole: bool
) -> tuple[Needed, list[frozenset[int]]]:
    """Count the bytes of both graphs with a decision applied, as compiled by inductor.

    Args:
        joined: the graphs, which stay unchanged.
        deciding: the decisions about the graphs.
        made: the decision.
        limit: bytes.
        small: true if kernels are kept small.
        whole: true to count the forward pass even if the backward pass exceeds the limit.

    Returns:
        The bytes, and for each counted kernel the set of runs that are fused in the kernel.
    """
    tried, options = joined.copied(), deciding.options
    runs = apply(
        tried, made.captured, made.rewriting, host_limit=options.host_limit, own_bytes=made.own_bytes
    )
    passes = passes_of(tried, made, deciding.step.workspace, limit, small=small, only_look=True)
    halves = tried.halves
    together: list[frozenset[int]] = []
    for backward, module in ((True, halves.backward), (False, halves.forward)):
        output = output_of(module)
        results = output.args[0] if backward else output.args[0][: halves.outputs]
        output.meta["user_visible_output_idxs"] = [
            i for i, n in enumerate(results) if isinstance(n, torch.fx.Node)
        ]
        run_of = {node.name: run for node, run in runs.items() if node.graph is module.graph}
        inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        try:
            settings = passes[backward].settings()
            with config.patch(settings), told(donated(tried, made)), as_written():
                compile_fx_inner(module, inputs, is_backward=backward)
        except Exception:
            if not passes[backward].known:
                raise
        kernels = passes[backward].operations
        together += [frozenset(run_of[name] for name in names if name in run_of) for names in kernels]
        if passes[backward].loads.max() > limit and not whole:
            break
    peaks = {backward: int(one.loads.max()) for backward, one in passes.items()}
    worst = passes[peaks[True] >= peaks[False]]
    kernel = " ".join(worst.operations[int(worst.loads.argmax())])
    return Needed(peaks[False], peaks[True], passes[True].begun, kernel, small), together
