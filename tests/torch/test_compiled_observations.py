"""Records of live memory and observations of runs, without compiling anything."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn

from mempool.torch.compiled.external_memory import ForwardRun, LiveMemory
from mempool.torch.compiled.options import Options
from mempool.torch.compiled.records import ExternalMemory, Observations, RunStart
from mempool.torch.compiled.runtime_observer import RuntimeObserver
from mempool.torch.compiled.shared_limit import GraphUnderLimit, SharedLimit


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
        observer.after_backward()
    observer.after_backward()  # once


def test_earlier_observations_bound_outside_bytes() -> None:
    """A recompiled graph uses the largest observation, since other graphs have not run yet."""
    budget, options = SharedLimit(None), Options(limit=1000, beside=1000)
    now = ExternalMemory(held=50, kept=40, own=3, freed_inputs=(2,), parameters=7, gradients=5)
    first = GraphUnderLimit(options, budget, 0, True, now)
    assert (first.counted_external, first.runs) == (now, 1)
    assert [first.outside(99).during(backward=backward) for backward in (False, True)] == [1060, 1055]
    seen = budget.observer.known[0] = Observations()
    for moment in (RunStart(60, 8, 4, 20, 2, kept=10), RunStart(61, 8, 4, 0, 0, kept=11)):
        seen.note(moment, backward=False)
    seen.note(RunStart(90, 8, 2, 0, 1, kept=10), backward=True)
    graph_under_limit = GraphUnderLimit(options, budget, 0, True, now)
    assert graph_under_limit.counted_external == ExternalMemory(
        held=90, kept=40, own=2, freed_inputs=(2,), parameters=8, gradients=5
    )
    assert graph_under_limit.runs == 3
    for kept, forward, backward in ((10, 92, 100), (12, 96, 102), (0, 73, 100)):
        outside = graph_under_limit.outside(kept)
        assert [outside.during(backward=one) for one in (False, True)] == [1000 + forward, 1000 + backward]


def test_pending_gradients_count_until_consumed() -> None:
    model = nn.Linear(8, 8, bias=False)
    live_memory = LiveMemory()
    live_memory.register([model], [])
    first, second = torch.ones(10), torch.ones(20)
    live_memory.record_backward([first, None, second])
    assert live_memory.pending_gradient_bytes([]) == 120
    assert live_memory.pending_gradient_bytes([first]) == 80
    del second
    assert live_memory.pending_gradient_bytes([]) == 40
    model.weight.grad = torch.ones(8, 8)
    assert sum(live_memory.gradients().values()) == 256
    live_memory.step()
    beside = live_memory.external(
        0, [], more=True
    )  # when the forward pass begins; who knows how long they stay
    assert (beside.held, beside.kept, beside.gradients) == (256, 0, 0)


def test_optimizer_state_is_found_by_parameters() -> None:
    """The state counts once, as part of the option `beside`."""
    model, other = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (model, other)]
    for one in (*model.parameters(), *other.parameters()):
        one.grad = torch.ones_like(one)
    for optimizer in optimizers:
        optimizer.step()
    state = [one for kept in optimizers[0].state.values() for one in kept.values()]
    live_memory = LiveMemory()
    live_memory.register([model], [])
    live_memory.record_forward(0, ForwardRun(live_memory.memories(state), {}, {}))
    live_memory.step()
    beside = live_memory.external(1, [*model.parameters()], more=False)
    assert beside.state == 2 * 4 * (64 + 8) + 2 * 4  # moments, and the counts of steps
    assert (beside.held, beside.parameters) == (4 * (64 + 8), 0)
    for told, there in ((10, beside.state), (10_000, 10_000)):
        graph_under_limit = GraphUnderLimit(Options(beside=told), SharedLimit(None), 1, False, beside)
        assert graph_under_limit.outside(0).during(backward=True) == there
