"""Alternating iterations of several variants have one schedule each, made once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.torch.eager.mode import OffloadMode
from mempool.torch.eager.patterns import PatternRegistry
from mempool.torch.eager.recorded_iteration import RecordedIteration
from mempool.torch.offload.host_engine import HostEngine
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from mempool.torch.eager.patterns import OffloadSchedule

MIB, CPU = 1 << 20, torch.device("cpu")
LIMIT = 2 * MIB
#: Batches by letter; lower-case letters make no optimizer step: g accumulates, e evaluates.
SIZES = {"A": 1024, "B": 1536, "C": 700, "D": 512, "E": 900, "F": 1100, "g": 1024, "e": 1024}


def trained(kinds: str, mode: OffloadMode | None = None, *, marked: bool = False) -> list[float]:
    """Return the losses of iterations of the given variants."""
    torch.manual_seed(0)
    layers = [module for _ in range(6) for module in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    net, random = torch.nn.Sequential(*layers), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)
    losses = []
    for kind in kinds:
        with torch.set_grad_enabled(kind != "e"):
            loss = net(torch.randn(SIZES[kind], 64, generator=random)).square().mean()
        if kind != "e":
            loss.backward()
        if kind.isupper():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        del loss
        if mode is not None and marked:
            mode.marked = True
            mode.step()
    return losses


@pytest.mark.parametrize(
    ("turn", "marked"),
    [
        ("AABB", False),
        ("gggA", True),
        ("AAAe", True),
        *(pytest.param(turn, False, marks=pytest.mark.full) for turn in ("AB", "AAAB", "AAAAee")),
    ],
)
def test_each_variant_has_a_single_schedule_in_any_order(
    turn: str, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three turns no schedule is made and no iteration diverges; without marks, passes are merged."""
    kinds = turn * 5
    plain = trained(kinds)
    engine = HostEngine(64 * MIB)
    peaks: list[int] = []
    with OffloadMode(engine, torch.device("cpu"), LIMIT) as mode:
        counts = mode.counts
        calm: list[tuple[int, int]] = []
        end = mode.iterations.end

        def ended() -> None:
            end()
            calm.append((counts.plans, counts.diverged))
            peaks.append(counts.peak_bytes)
            counts.peak_bytes = 0

        monkeypatch.setattr(mode.iterations, "end", ended)
        assert trained(kinds, mode, marked=marked) == plain
        assert mode.counts.out_bytes > 0
    engine.close()
    settled = len([kind for kind in kinds[: 4 * len(turn)] if marked or kind.isupper()])
    assert calm[settled:] == [calm[-1]] * len(calm[settled:])
    assert counts.plans <= 1 + len(turn)
    assert max(peaks[settled:]) <= LIMIT


def test_more_variants_than_schedules_end_planning() -> None:
    kinds = "ABCDEF" * 6
    plain = trained(kinds)
    engine = HostEngine(64 * MIB)
    with OffloadMode(engine, torch.device("cpu"), LIMIT) as mode:
        assert trained(kinds, mode) == plain
        assert mode.counts.plans <= 2 + OPTIONS.max_patterns
        assert mode.counts.diverged < len(kinds) - 2 * OPTIONS.max_patterns
    engine.close()


# --- prediction of the next variant


def program(*functions: object, sizes: tuple[int, ...] = ()) -> Any:
    births = [(at, at, size) for at, size in enumerate(sizes)]
    return SimpleNamespace(recording=RecordedIteration(functions=list(functions), births=births))


def kept(*programs: OffloadSchedule) -> tuple[PatternRegistry, list[Any]]:
    patterns = PatternRegistry()
    return patterns, [patterns.add(one) for one in programs]


def test_only_a_stale_pattern_is_replaced() -> None:
    patterns, made = kept(*map(program, range(OPTIONS.max_patterns)))
    new = program(OPTIONS.max_patterns)
    assert not patterns.recurs(new.recording)
    assert not patterns.recurs(new.recording)  # the table of schedules is full
    for _ in range(OPTIONS.stale_iterations):
        patterns.record_end(made[1])
    assert patterns.recurs(new.recording)
    patterns.add(new)
    assert len(patterns) == OPTIONS.max_patterns
    assert patterns.matching_prefix(RecordedIteration(), 1, None) is made[1]
    assert patterns.matching_prefix(RecordedIteration(), OPTIONS.max_patterns, None) is not None
    assert not patterns.recurs(new.recording)  # the variant has a schedule


def test_evictions_count_in_consecutive_iterations_only() -> None:
    _, (pattern,) = kept(program())
    assert [pattern.record_disturbance(disturbed=one) for one in (True, False, True, True)] == [
        False,
        False,
        False,
        True,
    ]


class Kept(torch.autograd.Function):
    """A function that saves a tensor its backward pass never reads, like an LSTM cell."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x + 1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def test_storage_that_nothing_reads_again_leaves_until_its_death() -> None:
    x, size = torch.ones(1 << 14, requires_grad=True), 4 << 14
    limit = 6 * size + 256  # room for the sum and its gradient
    with OffloadMode(HostEngine(1 << 24), CPU, limit) as mode:
        evicted = list[int]()
        for _ in range(5):
            y = x
            for _ in range(12):
                y = Kept.apply(y)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.eq(2.0**12).all()
            x.grad = None
            mode.step()
            evicted.append(mode.counts.evicted)
        schedule = mode.iterations.schedule
        assert schedule is not None
        assert schedule.recorded.step.peak_bytes > 12 * size
        assert schedule.swap.limit_bytes <= limit
        assert mode.counts.iteration_out_bytes >= 8 * size
        assert mode.counts.iteration_in_bytes <= size  # only `x` is reloaded
        assert evicted[1:] == evicted[:-1]  # the first iteration has no schedule
        assert mode.counts.over_limit == 0
