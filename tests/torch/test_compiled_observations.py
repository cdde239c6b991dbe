"""Records of live memory and observations of runs, without compiling anything."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn

from mempool.torch.compiled.external_memory import ForwardRun, LiveMemory
from mempool.torch.compiled.records import RunStart
from mempool.torch.compiled.runtime_observer import RuntimeObserver


def test_live_memory_holds_no_reference() -> None:
    """Inputs, results and saved values count for later graphs and stay weakly referenced."""
    model = nn.Linear(8, 8)
    batch, result, kept = torch.ones(10), torch.ones(20), torch.ones(30)
    live_memory = LiveMemory()
    live_memory.register([model], [batch])
    live_memory.external(0, [batch, model.weight], more=True)
    memories = (
        live_memory.memories(some) for some in ([batch, model.weight], [result, 3], [kept, model.weight])
    )
    live_memory.record_forward(0, ForwardRun(*memories))
    beside = live_memory.external(1, [result], more=True)
    assert (beside.held, beside.kept, beside.own) == (160, 160, 0)
    assert beside.parameters == 4 * (64 + 8)
    assert beside.gradients == 4 * 8  # of the bias, which no graph has read so far
    other = live_memory.external(1, [], more=False)
    assert (other.held, other.kept, other.gradients) == (240, 160, 0)
    again = live_memory.external(0, [batch, model.weight], more=False)
    assert (again.held, again.own) == (0, 200)
    del kept
    assert live_memory.external(1, [result], more=False).held == 40
    live_memory.step()
    assert live_memory.external(1, [result], more=False).held == 0


def test_observation_ends_after_three_steps() -> None:
    """A later compilation turns the observations into known bytes."""
    observer, result = RuntimeObserver(), torch.ones(10)
    observer.live_memory.register([], [result])
    number = observer.number("some code", [])
    first = observer.observed[number]
    first.note(RunStart(others=1), backward=False)
    for _ in range(3):
        assert observer.is_open
        observer.before_run(backward=False)
        assert not observer.live_memory.runs(number)
        observer.live_memory.record_forward(
            number, ForwardRun({}, observer.live_memory.memories([result]), {})
        )
        assert observer.live_memory.runs(number)
        observer.before_run(backward=True)
    observer.before_run(backward=False)
    assert not observer.is_open
    assert not observer.live_memory.runs(number)
    assert (observer.number("some code", []), observer.number("other code", [])) == (number, number + 1)
    assert observer.is_open
    assert observer.known == {number: first}
    assert observer.observed[number] is not first


def test_failed_recompilation_warns_once() -> None:
    observer = RuntimeObserver()
    observer.mark_stale(observer.number("no code", []))
    with pytest.warns(UserWarning, match="more than was counted"):
        observer.discard_stale()
    observer.discard_stale()  # once
