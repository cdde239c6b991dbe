"""Search the limit to ask for in terms of operations, so that the fused kernels hold the real limit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner

from mempool.torch.compiled.inductor.kernels import passes_of
from mempool.torch.compiled.inductor.patches import donated, exact_rounding, told
from mempool.torch.compiled.joint_graph import output_of
from mempool.torch.compiled.passes import apply
from mempool.torch.compiled.records import Extreme, KernelMemory
from solvers.errors import PlanError
from solvers.rewriting.shared_reloads import shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.compiled.decide import StepDecider
    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.records import StepDecision

Told = TypeVar("Told")


#: Largest reduction of the asked limit, as a share of the limit, at which the compiler's own kernels are
#: tried again: the same kernels may well hold a limit that is so little exceeded.
_SLIGHT = 0.04


#: Unused share of a limit, and lost share of a step's time, up to which asking for more bytes is not
#: worthwhile.
_NEAR, _LOSS = 0.05, 0.02


#: Most attempts with a lower limit, and with a higher one.
_DOWN, _UP = 4, 2


Asked = int | Extreme


@dataclass(frozen=True)
class Trial(Generic[Told]):
    """The outcome of asking for one limit.

    Attributes:
        peak_bytes: lower bound on the peak of the kernels; exact if within the limit.
        operation_bytes: peak of the operations, at most the limit asked for.
        loss: additional time of the step compared with no limit, as a share.
        told: further information.
    """

    peak_bytes: int
    operation_bytes: int
    loss: float
    told: Told


def ask(limit: int, least: int, look: Callable[..., Trial[Told]]) -> tuple[Trial[Told], bool]:
    """Return the outcome that holds a limit with little loss or has the lowest peak, and if the limit holds.

    Kernels of the compiler's choice are tried first. If they exceed the limit by much, small kernels follow:
    a kernel that reads little keeps little memory waiting. Last come the extremes, which depend on no
    measurement: the error names their lowest peak, and that number is reached again when given as the limit.

    Args:
        limit: bytes.
        least: the lowest limit that may be asked for; may exceed `limit`.
        look: asks for a limit or an extreme, with kernels that are ``small`` or not.
    """
    asked = max(limit, least)
    found = look(asked, small=False)
    if found.peak_bytes <= limit:
        return _more(limit, asked, None, found, partial(look, small=False)), True
    below = found.operation_bytes - (found.peak_bytes - limit)
    if least <= below and limit - below <= _SLIGHT * limit:
        found = look(below, small=False)
        if found.peak_bytes <= limit:
            return found, True
    above: int | None = None
    for times in range(_DOWN):
        found = look(asked, small=True)
        if found.peak_bytes <= limit:
            return _more(limit, asked, above, found, partial(look, small=True)), True
        if asked == least:
            break
        above = asked
        asked = found.operation_bytes - (1 + times) * (found.peak_bytes - limit)
        if times + 2 == _DOWN or asked < least:
            asked = least
    last = []
    for extreme, small in product(Extreme, (False, True)):
        last.append(look(extreme, small=small))
        if last[-1].peak_bytes <= limit:
            return last[-1], True
    return min(last, key=lambda one: one.peak_bytes), False


def _more(
    limit: int, asked: int, above: int | None, found: Trial[Told], look: Callable[[int], Trial[Told]]
) -> Trial[Told]:
    """Improve an outcome by asking for more bytes, but for fewer than `above`, which was too much."""
    for _ in range(_UP):
        room = limit - found.peak_bytes
        if room <= _NEAR * limit or found.loss <= _LOSS:
            break
        more = asked + room if above is None else min(asked + room, (asked + above) // 2)
        other = look(more)
        if other.peak_bytes > limit:
            break
        found, asked = other, more
    return found


def fitted(joined: MergedGraph, deciding: StepDecider, limit: int) -> tuple[StepDecision, list[StepDecision]]:
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
    def decided(asked: Asked) -> StepDecision:
        with contextlib.suppress(PlanError):  # the host is too small
            return deciding.extreme(asked) if isinstance(asked, Extreme) else deciding.within(asked)
        return decided(Extreme.NO_OUTSIDE_BYTES)

    @cache
    def look(asked: Asked, *, small: bool) -> Trial[StepDecision]:
        operations = decided(asked)
        whole = deciding.terms.least or isinstance(asked, Extreme) or asked == least
        made, together = kernels(operations, small=small, whole=whole)
        rewriting = shared(made.captured.graph, made.rewriting, together)
        if rewriting != made.rewriting:
            other, _ = kernels(deciding.of(rewriting), small=small, whole=whole)
            made = min(made, other, key=lambda one: (max(one.peak_bytes, limit), one.timed.seconds))
        loss = made.timed.seconds / made.plain.seconds - 1 if made.plain.seconds else 0.0
        return Trial(made.peak_bytes, operations.timed.peak_bytes, loss, made)

    def kernels(made: StepDecision, *, small: bool, whole: bool) -> tuple[StepDecision, list[frozenset[int]]]:
        need, together = needed(joined, deciding, made, limit, small=small, whole=whole)
        looked.append(replace(made, needed=need))
        return looked[-1], together

    looked: list[StepDecision] = []
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
    joined: MergedGraph, deciding: StepDecider, made: StepDecision, limit: int, *, small: bool, whole: bool
) -> tuple[KernelMemory, list[frozenset[int]]]:
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
    passes = passes_of(tried, made, deciding.step.workspace, limit, small=small, stop_when_known=True)
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
            with config.patch(settings), told(donated(tried, made)), exact_rounding():
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
    return KernelMemory(peaks[False], peaks[True], passes[True].begun, kernel, small), together
