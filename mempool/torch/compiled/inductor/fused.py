"""Memory of fused graphs, and the search for a decision whose kernels hold a limit.

Inductor fuses many operations into one kernel. A value that only one kernel makes and reads needs no memory,
and a kernel's inputs live until the kernel ends, so the peak differs from the peak of separate operations.
This module lowers graphs until the kernels and their order are known, and counts the bytes of these kernels.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner

from mempool.torch.compiled.graph_passes import apply
from mempool.torch.compiled.inductor.kernels import kernel_passes
from mempool.torch.compiled.inductor.limit_search import Request, Trial, search_limit
from mempool.torch.compiled.inductor.patches import donated_inputs, exact_rounding, restrict_donated
from mempool.torch.compiled.joint_graph import output_of
from mempool.torch.compiled.records import Extreme, KernelMemory
from solvers.errors import PlanError
from solvers.rewriting.refinement import merge_shared_reloads

if TYPE_CHECKING:
    from mempool.torch.compiled.decide import StepDecider
    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.records import StepDecision


def fit_kernels(
    merged: MergedGraph, decider: StepDecider, limit: int
) -> tuple[StepDecision, list[StepDecision]]:
    """Return the decision whose kernels hold the limit, and all decisions that were tried.

    A decision counts the memory of operations, not of kernels. So other limits are requested until the
    kernels fit.

    Args:
        merged: the graphs, which stay unchanged.
        decider: the decisions about the graphs.
        limit: bytes.

    Raises:
        PlanError: even the decision with the lowest peak of operations exceeds the limit.
    """
    least = decider.least_limit()

    @cache
    def decide_for(requested: Request) -> StepDecision:
        with contextlib.suppress(PlanError):  # the host is too small
            return (
                decider.decide_extreme(requested)
                if isinstance(requested, Extreme)
                else decider.decide_within(requested)
            )
        return decide_for(Extreme.NOTHING)

    @cache
    def try_limit(requested: Request, *, small: bool) -> Trial[StepDecision]:
        operations = decide_for(requested)
        whole = decider.constraints.keep_least or isinstance(requested, Extreme) or requested == least
        decision, together = kernels(operations, small=small, whole=whole)
        rewriting = merge_shared_reloads(decision.captured.graph, decision.rewriting, together)
        if rewriting != decision.rewriting:
            other, _ = kernels(decider.simulate_decision(rewriting), small=small, whole=whole)
            decision = min(
                decision,
                other,
                key=lambda candidate: (max(candidate.peak_bytes, limit), candidate.simulated.seconds),
            )
        loss = decision.simulated.seconds / decision.plain.seconds - 1 if decision.plain.seconds else 0.0
        return Trial(decision.peak_bytes, operations.simulated.peak_bytes, loss, decision)

    def kernels(
        decision: StepDecision, *, small: bool, whole: bool
    ) -> tuple[StepDecision, list[frozenset[int]]]:
        need, together = count_kernels(merged, decider, decision, limit, small=small, whole=whole)
        tried.append(replace(decision, kernel_memory=need))
        return tried[-1], together

    tried: list[StepDecision] = []
    found, holds = search_limit(limit, least, try_limit)
    need = found.outcome.kernel_memory
    if not holds and need is not None:
        raise PlanError(
            f"no step fits in {limit} bytes: a kernel of fused operations ({need.kernel[:200]}) "
            f"needs {need.peak_bytes}",
            need.peak_bytes,
        )
    return found.outcome, tried


def count_kernels(
    merged: MergedGraph, decider: StepDecider, decision: StepDecision, limit: int, *, small: bool, whole: bool
) -> tuple[KernelMemory, list[frozenset[int]]]:
    """Count the bytes of both graphs, with a decision applied and compiled by inductor.

    Args:
        merged: the graphs, which stay unchanged.
        decider: the decisions about the graphs.
        decision: the decision.
        limit: bytes.
        small: true if kernels are kept small.
        whole: true to count the forward pass even if the backward pass exceeds the limit.

    Returns:
        The bytes, and for each counted kernel the set of its fused runs.
    """
    tried, options = merged.copy(), decider.options
    runs = apply(
        tried,
        decision.captured,
        decision.rewriting,
        host_limit=options.host_limit,
        own_bytes=decision.own_bytes,
    )
    passes = kernel_passes(tried, decision, decider.step.workspace, limit, small=small, stop_when_known=True)
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
            with config.patch(settings), restrict_donated(donated_inputs(tried, decision)), exact_rounding():
                compile_fx_inner(module, inputs, is_backward=backward)
        except Exception:
            if not passes[backward].known:
                raise
        kernels = passes[backward].operations
        together += [frozenset(run_of[name] for name in names if name in run_of) for names in kernels]
        if passes[backward].loads.max() > limit and not whole:
            break
    peaks = {backward: int(kernels.loads.max()) for backward, kernels in passes.items()}
    worst = passes[peaks[True] >= peaks[False]]
    kernel = " ".join(worst.operations[int(worst.loads.argmax())])
    return KernelMemory(peaks[False], peaks[True], passes[True].initial_bytes, kernel, small), together
