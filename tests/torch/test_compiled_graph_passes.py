"""The edited graphs equal the formal rewriting of the same decisions."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import numpy as np
from graph_reader import GraphReader, partitioned
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rewriting_graphs import rewritings
from torch import nn

from mempool.torch.compiled.decide import decidable
from mempool.torch.compiled.graph_passes import apply
from mempool.torch.compiled.joint_graph import trace_joint
from solvers.rewriting import Graph, Rewriting, Role, apply_rewriting
from solvers.rewriting.decide import Decider
from solvers.rewriting.judge import simulate
from solvers.rewriting.pass_boundary import split_by_pass
from solvers.swap import Link

if TYPE_CHECKING:
    from collections.abc import Callable

LINK = Link(1e-5, 1e-10, 1e-5, 1e-10)


def dense() -> nn.Module:
    norm = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*norm, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


class Attention(nn.Module):
    """Attention with views of one tensor and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.all(x).view(16, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        result: torch.Tensor = self.out(y.transpose(1, 2).reshape(16 * 16, 32)) + x
        return result


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"dense": dense, "attention": Attention, "normed": normed}


@functools.cache
def joint(name: str) -> Any:
    torch.manual_seed(0)
    return trace_joint(MODELS[name](), (torch.randn(256, 32),), lambda y: y.square().mean())


def edited_graphs(name: str, decide: Callable[[Graph], Rewriting]) -> tuple[Graph, Rewriting, Graph]:
    """Apply decisions to a model; return the graph, the decisions, and the graph that PyTorch runs."""
    merged, captured = partitioned(joint(name))
    decided = decide(decidable(captured))
    read = GraphReader(merged, captured)
    apply(merged, captured, decided)
    return captured.graph, decided, read.graph()


def check(was: Graph, decided: Rewriting, runs: Graph) -> tuple[Graph, list[int], list[int]]:
    """What runs reads the same contents in the same order, in no more memory; what is of no use is left out.

    Returns: the formal graph, and the bytes in it and in what runs at each operation that both have.
    """
    formal = apply_rewriting(was, split_by_pass(was, decided))
    place, number = {name: i for i, name in enumerate(formal.names)}, {n: i for i, n in enumerate(was.names)}
    for op in np.flatnonzero(runs.role == Role.ORIGINAL).tolist():
        assert runs.content[runs.read_by(op)].tolist() == was.read_by(number[runs.names[op]]).tolist()
    rows = [place[name] for name in runs.names if name in place]
    assert rows == sorted(rows)
    same = [op for op, name in enumerate(runs.names) if name in place]
    held = simulate(formal, LINK).load[rows].tolist(), simulate(runs, LINK).load[same].tolist()
    assert all(run <= written for written, run in zip(*held, strict=True))
    for role in (Role.OFFLOAD, Role.RELOAD):
        written, run = (Counter(moved(graph, role)) for graph in (formal, runs))
        assert run <= written
    return formal, *held


def moved(graph: Graph, role: Role) -> list[int]:
    """Return the contents that the copies of one direction copy."""
    return graph.content[graph.reads[graph.reads_start[:-1][graph.role == role]]].tolist()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", [0.6, 0.2, 0.0])
def test_edited_graphs_run_as_the_simulated_decision(name: str, part: float) -> None:
    def decide(graph: Graph) -> Rewriting:
        chooser = Decider(graph, LINK)
        least, plain = chooser.least()[0], simulate(graph, LINK).peak_bytes
        return chooser.decide(int(least + (plain - least) * part)).rewriting

    was, decided, runs = edited_graphs(name, decide)
    formal, written, held = check(was, decided, runs)
    judged, ran = simulate(formal, LINK), simulate(runs, LINK)
    assert (
        set(was.names) - set(runs.names) or held == written
    )  # what only the backward pass needed is left out
    assert (ran.host_bytes, ran.moved_bytes) == (judged.host_bytes, judged.moved_bytes)
    assert ran.seconds <= judged.seconds * 1.000001
    assert judged.peak_bytes <= simulate(apply_rewriting(was, decided), LINK).peak_bytes


@settings(max_examples=12, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from(list(MODELS)))
def test_edited_graphs_match_the_formal_rewriting(data: st.DataObject, name: str) -> None:
    check(*edited_graphs(name, lambda graph: split_by_pass(graph, data.draw(rewritings(graph)))))
