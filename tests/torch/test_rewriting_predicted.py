"""What is predicted is of what the two graphs do, and what is asked for beside a limit is heard."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from halves import Read, parted
from rewritten import PLAIN, compiled
from torch import nn

from mempool.torch.compiled import copy_overhead
from mempool.torch.compiled.aot_trace import joint_of
from mempool.torch.compiled.copy_overhead import calls_of
from mempool.torch.compiled.decide import Decided, Deciding
from mempool.torch.compiled.graph_budget import BUDGETS
from mempool.torch.compiled.options import parsed
from mempool.torch.compiled.passes.apply import apply
from mempool.torch.compiled.runtime import RUNTIME, Moved
from mempool.torch.compiled.step import measured
from solvers.rewriting.judge import simulate
from solvers.swap import Link

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

LINK = Link(1e-5, 1e-10, 1e-5, 1e-10)


def last() -> Decided:
    """What became of the graph that was compiled last."""
    (part,) = BUDGETS[-1].parts.values()
    return part.decided


def waves(x: torch.Tensor) -> torch.Tensor:
    return (x.exp().sin() * x.cos().exp()).tanh().exp()


def point() -> torch.Tensor:
    return torch.linspace(0, 1, 4096).view(64, 64).requires_grad_()


def test_what_is_predicted_is_of_graphs_that_share_no_copy_back() -> None:
    """The forward and the backward pass have each its own, and what leaves has left when the first ends."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(3)]
    joint = joint_of(nn.Sequential(*layers), (torch.randn(64, 32),), lambda y: y.square().mean())
    joined, _ = parted(joint)
    options = parsed({**PLAIN, "threshold": 0, "link": LINK})
    made = Deciding(measured(joined, options), options).decide()
    read = Read(joined, made.captured)
    apply(joined, made.captured, made.rewriting)
    runs = simulate(read.graph(), LINK)
    assert made.rewriting.offloads
    assert (made.timed.moved_bytes, made.timed.returned_bytes) == (runs.moved_bytes, runs.returned_bytes)
    assert made.timed.host_bytes == runs.host_bytes


def test_what_a_checkpoint_makes_again_has_memory_of_its_own() -> None:
    """It is a node of the same name in both graphs, and two values."""

    def again(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(waves, x * 2, use_reentrant=False)
        return result.sum()

    compiled(again, {**PLAIN, "limit": 1 << 30, "link": LINK})(point())
    graph = last().captured.graph
    made_again = np.flatnonzero(graph.backward[graph.producer] & (graph.producer >= 0) & (graph.size > 0))
    kinds = {graph.kinds[graph.kind[graph.producer[value]]] for value in made_again}
    assert {"aten.exp", "aten.sin", "aten.tanh"} <= kinds


def test_the_host_has_no_more_than_is_allowed() -> None:
    """What does not fit there is refused when it is decided, rather than when it runs."""
    options = {**PLAIN, "link": LINK}
    compiled(waves, {**options, "limit": 1 << 30})(point())
    limit = int(0.9 * last().plain.peak_bytes)
    compiled(waves, {**options, "limit": limit})(point())
    host = last().timed.host_bytes
    with pytest.raises(Exception, match=f"with {host - 1} bytes on the host"):
        compiled(waves, {**options, "limit": limit, "host_limit": host - 1})(point())


def test_a_pattern_that_names_nothing_is_told() -> None:
    options = {**PLAIN, "limit": 1 << 30, "link": LINK, "exclude": ["aten.tanh", "encodr.*"]}
    with pytest.warns(UserWarning, match=r"no operation or module is named 'encodr\.\*'"):
        compiled(waves, options)(point())


def test_asking_for_copies_is_measured_and_counts_nowhere() -> None:
    RUNTIME.moved = Moved(outs=7)
    calls_of.cache_clear()
    measured = calls_of(torch.device("cpu"))
    assert measured.seconds > 0
    assert measured.own_seconds + measured.own_per_byte > 0
    assert RUNTIME.moved == Moved(outs=7)
    assert RUNTIME.away == 0


@pytest.mark.parametrize(("own_bytes", "seconds"), [(256 << 10, 1.0), (1 << 62, 4.0)])
def test_what_a_byte_takes_is_measured_on_copies_as_large_as_the_program_makes(
    own_bytes: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are not in the cache: here they take four times as long, by the byte."""

    def best(device: object, size: int, *_: object) -> float:
        return 1e6 + size * (4.0 if size >= 1 << 20 else 1.0)

    monkeypatch.setattr(copy_overhead, "_best", best)
    engine = RUNTIME.engine(torch.device("cpu"))
    assert engine.sync_copier is not None
    monkeypatch.setattr(engine.sync_copier, "sync_bytes", own_bytes)
    calls_of.cache_clear()
    try:
        measured = calls_of(torch.device("cpu"))
    finally:
        calls_of.cache_clear()
    assert measured.inline_bytes == own_bytes
    assert measured.inline_per_byte == pytest.approx(seconds, rel=0.4)
