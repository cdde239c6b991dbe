"""Iterations of several kinds in turn: a plan for each, made once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.torch.eager.mode import Swapper
from mempool.torch.eager.patterns import _MOST, _STALE, Patterns
from mempool.torch.eager.recorded_iteration import Tape
from mempool.torch.offload.host_engine import HostEngine

if TYPE_CHECKING:
    from mempool.torch.eager.schedule_actions import Program

MIB = 1 << 20
LIMIT = 2 * MIB
#: Batches by letter; in small letters without a step of the optimizer: g accumulates, e only looks.
SIZES = {"A": 1024, "B": 1536, "C": 700, "D": 512, "E": 900, "F": 1100, "g": 1024, "e": 1024}


def trained(kinds: str, swapper: Swapper | None = None, *, marked: bool = False) -> list[float]:
    """The losses of iterations of these kinds."""
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
        if swapper is not None and marked:
            swapper.marked = True
            swapper.step()
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
def test_each_kind_has_one_plan_and_is_followed_whatever_the_order(
    turn: str, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three turns nothing is planned and nothing departs any more; without marks, passes are one."""
    kinds = turn * 5
    plain = trained(kinds)
    engine = HostEngine(64 * MIB)
    peaks: list[int] = []
    with Swapper(engine, torch.device("cpu"), LIMIT) as swapper:
        counts = swapper.counts
        calm: list[tuple[int, int]] = []
        end = swapper.iterations.end

        def ended() -> None:
            end()
            calm.append((counts.plans, counts.diverged))
            peaks.append(counts.peak_bytes)
            counts.peak_bytes = 0

        monkeypatch.setattr(swapper.iterations, "end", ended)
        assert trained(kinds, swapper, marked=marked) == plain
        assert swapper.counts.out_bytes > 0
    engine.close()
    settled = len([kind for kind in kinds[: 4 * len(turn)] if marked or kind.isupper()])
    assert calm[settled:] == [calm[-1]] * len(calm[settled:])
    assert counts.plans <= 1 + len(turn)
    assert max(peaks[settled:]) <= LIMIT


def test_where_there_are_more_kinds_than_plans_no_plan_is_made_for_ever() -> None:
    kinds = "ABCDEF" * 6
    plain = trained(kinds)
    engine = HostEngine(64 * MIB)
    with Swapper(engine, torch.device("cpu"), LIMIT) as swapper:
        assert trained(kinds, swapper) == plain
        assert swapper.counts.plans <= 2 + _MOST
        assert swapper.counts.diverged < len(kinds) - 2 * _MOST
    engine.close()


# --- which comes next


def program(*functions: object, sizes: tuple[int, ...] = ()) -> Any:
    born = [(at, at, size) for at, size in enumerate(sizes)]
    return SimpleNamespace(tape=Tape(functions=list(functions), born=born))


def kept(*programs: Program) -> tuple[Patterns, list[Any]]:
    patterns = Patterns()
    return patterns, [patterns.add(one) for one in programs]


@pytest.mark.parametrize("turn", ["AAB", "AABB", "AB", "AAABCC"])
def test_what_comes_next_is_foretold_after_two_turns(turn: str) -> None:
    patterns, (a, b, c) = kept(program("a"), program("b"), program("c"))
    made = {"A": a, "B": b, "C": c}
    for number, kind in enumerate(turn * 5):
        if number >= 2 * len(turn):
            assert patterns.next() is made[kind]
        patterns.was(made[kind])


def test_another_plan_is_followed_from_the_operation_that_shows_that_it_is_another() -> None:
    patterns, (one, other, large) = kept(
        program("x", "y", "z", sizes=(8, 8)),
        program("x", "y", "w", sizes=(8, 8)),
        program("x", "y", "z", sizes=(8, 16)),
    )
    begun = Tape(functions=["x", "y"], born=[(7, 0, 8), (9, 1, 8)])
    assert patterns.like(begun, "w", one) is other
    assert patterns.like(begun, "v", one) is None
    assert patterns.like(begun, "z", one) is None
    begun = Tape(functions=["x"], born=[(7, 0, 8), (9, 1, 16)])
    assert patterns.like(begun, None, one) is large
    assert patterns.like(Tape(functions=["x", "y", "z"]), None, one) is None


def test_a_plan_leaves_for_another_only_if_it_was_not_followed_for_long() -> None:
    patterns, made = kept(*map(program, range(_MOST)))
    new = program(_MOST)
    assert not patterns.recurs(new.tape)
    assert not patterns.recurs(new.tape)  # all places are taken
    for _ in range(_STALE):
        patterns.was(made[1])
    assert patterns.recurs(new.tape)
    patterns.add(new)
    assert len(patterns) == _MOST
    assert patterns.like(Tape(), 1, None) is made[1]
    assert patterns.like(Tape(), _MOST, None) is not None
    assert not patterns.recurs(new.tape)  # it has one
