"""Programs compiled by the backend, and their results."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joint_trace import JointGraph
from torch import nn
from torch._functorch.partitioners import default_partition

from mempool.torch.compiled import shared_limit
from mempool.torch.compiled.backend import register
from mempool.torch.compiled.decide import StepDecider
from mempool.torch.compiled.graph import CapturedGraph, capture
from mempool.torch.compiled.joint_graph import GraphPair, MergedGraph, join
from mempool.torch.compiled.records import Extreme, StepDecision
from mempool.torch.compiled.runtime import RUNTIME, TransferCounters
from solvers.rewriting import Graph, Rewriting

register()

PLAIN = {"inner": "eager"}
#: A limit that needs no offloads: see `force`.
ALL = {"inner": "eager", "limit": 1 << 40}


def waves(x: torch.Tensor) -> torch.Tensor:
    """Compute a chain of pointwise operations, which saves several values."""
    return (x.exp().sin() * x.cos().exp()).tanh().exp()


def force(patch: pytest.MonkeyPatch, decide: Callable[[Graph], Rewriting] | None = None) -> None:
    """Offload all movable values, or those chosen by a function of the graph, whatever the limit."""

    def decided(decider: StepDecider) -> StepDecision:
        if decide is None:
            return decider.decide_extreme(Extreme.ALL)
        return decider.simulate_decision(decide(decider._graph))

    patch.setattr(StepDecider, "decide", decided)
    patch.setattr(
        shared_limit, "_decide_fused", lambda _, decider, __: (decider.decide(), decider.kept_bytes)
    )


def compiled(function: Callable[..., Any], options: dict[str, Any] | None, **others: Any) -> Any:
    """Compile a function with fresh counters."""
    torch._dynamo.reset()
    RUNTIME.counters = TransferCounters()
    return torch.compile(function, backend="mempool", options=options, **others)


def partitioned(joint: JointGraph) -> tuple[MergedGraph, CapturedGraph]:
    """Partition a joint graph; return the merged graph and its capture."""
    inputs = [node.meta["val"] for node in joint.module.graph.find_nodes(op="placeholder")]
    halves = default_partition(joint.module, inputs, num_fwd_outputs=joint.forward_outputs)
    merged = join(GraphPair(*halves, joint.forward_outputs))
    return merged, capture(merged.module, joint.forward_outputs)


def trained(
    make: Callable[[], nn.Module],
    options: dict[str, Any] | None,
    *,
    steps: int = 3,
    width: int = 8,
    **others: Any,
) -> list[torch.Tensor]:
    """Return the losses of a few steps, then parameters and buffers."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss_of = compiled(lambda x: model(x).square().mean(), options, **others)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(torch.randn(16, width, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


def gradients(
    function: Callable[..., Any], options: dict[str, Any] | None, *inputs: Any
) -> list[torch.Tensor]:
    """Return the results of a function of tensors, and the gradients of its inputs."""
    torch.manual_seed(0)
    given = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    results = compiled(function, options)(*given)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    sum(one.double().sum() for one in results if one.requires_grad).backward()
    return [*(one.detach() for one in results), *(one.grad for one in given if one.requires_grad)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return true if both lists are non-empty and bit-identical."""
    return len(one) == len(other) > 0 and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(one, other, strict=True)
    )


def adamw_state_bytes(model: nn.Module) -> int:
    """Return the bytes of AdamW's state: two moments and a step count per parameter."""
    return sum(2 * one.nbytes + 4 for one in model.parameters())


def named_limit(refused: BaseException) -> int:
    """Return the limit that a refusal names."""
    said = str(refused)
    found = re.search(r"(\d+), which is enough", said) or re.search(r"needs (\d+)", said)
    assert found is not None, said
    return int(found[1])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
