"""Schedules followed in C++ give the right bytes within the limit, and call Python only for moves."""

from __future__ import annotations

import os
import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from followed_programs import (
    BYTES,
    COUNT,
    ELEMENTS,
    LIMIT,
    Tensors,
    iterate,
    mode_of,
    settle,
    swapping,
    unseen_operations,
)
from native_engine import NativeEngine

import mempool.torch
from mempool.reporting.outcomes import missed
from mempool.torch.eager.storages import RESIDENT

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(params=["host", "native"])
def moves_by(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pool(install: Callable[[int], mempool.torch.TensorPool]) -> mempool.torch.TensorPool:
    return install(LIMIT)


@pytest.mark.parametrize("seed", range(3))
def test_operations_with_other_tensors_than_scheduled_read_and_write_them(
    pool: mempool.torch.TensorPool, seed: int
) -> None:
    """Operations and shapes are as scheduled, so that each tensor appears where another is expected."""
    program = Tensors(seed)
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    assert unseen_operations(pool, lambda: program.iterate(list(range(COUNT)))) > COUNT
    assert swapping(pool)["iteration_out_bytes"] > BYTES
    for _ in range(12):
        iterate(pool, lambda: program.iterate(program.shuffled()), 1)
        iterate(pool, lambda: program.iterate(list(range(COUNT))), 1)


def test_write_during_an_offload_makes_the_copy_stale(pool: mempool.torch.TensorPool) -> None:
    """Each tensor in turn is used twice, the second time in place of the next one."""
    program, usual = Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    for one in usual[:-1]:
        iterate(pool, lambda: program.iterate(usual), 2)
        iterate(pool, lambda one=one: program.iterate([*usual[: one + 1], one, *usual[one + 2 :]]), 1)
    iterate(pool, lambda: program.iterate(usual), 1)


@pytest.mark.parametrize("seed", range(4))
def test_iterations_that_diverge_anywhere_lose_no_bytes(pool: mempool.torch.TensorPool, seed: int) -> None:
    program = Tensors(seed)
    usual = list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))

    def unusual() -> None:
        at = program.random.randrange(COUNT)
        program.iterate(usual[:at]) if at else None
        what = program.random.randrange(5)
        if what == 0:
            program.tensors[at] = program.tensors[at].clone()
        elif what == 1:
            torch.ones(program.random.randrange(1, 3 * ELEMENTS)).sum()
        elif what == 2:
            with pytest.raises(RuntimeError, match="size"):
                program.tensors[at] + torch.ones(ELEMENTS - 1)
        elif what == 3:
            with torch.inference_mode():
                program.check(program.tensors[at] * 1, program.values[at])
        else:
            return
        program.iterate(usual[at:] + usual[:at])

    for _ in range(10):
        iterate(pool, unusual, 1)
        iterate(pool, lambda: program.iterate(usual), program.random.randrange(1, 4))
    program.iterate(usual)


def test_iteration_like_the_last_calls_python_for_moves_only(pool: mempool.torch.TensorPool) -> None:
    """Python is not called at all if the interposer makes the moves."""
    program = Tensors()
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 2)  # the first one frees copies of evictions
    mode = mode_of(pool)
    seen, calls = [], mode.follower.calls
    dispatch = mode._dispatch
    mode._dispatch = lambda func, *rest: seen.append(func) or dispatch(func, *rest)
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 1)
    del mode._dispatch
    schedule = mode.iterations.schedule
    assert schedule is not None
    moving = sum(bool(one.before or one.after or one.dropped_copies) for one in schedule.actions)
    assert moving > 0
    is_native = isinstance(mode.engine, NativeEngine)
    assert mode.follower.calls - calls <= (0 if is_native else 2 * moving)
    assert [str(func) for func in seen if "item" not in str(func) and "local_scalar" not in str(func)] == []


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("count", [3, 6])
def test_unseen_writes_of_the_followed_thread_make_copies_stale(
    pool: mempool.torch.TensorPool, count: int, reads: bool
) -> None:
    """As after a guard that restores the thread's keys of before the installation."""
    program, usual = Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    iterate(pool, lambda: program.iterate(usual), 2)
    program.iterate(usual, count)
    if isinstance(engine := mode_of(pool).engine, NativeEngine):
        engine.make_all()
    for key in ("DeferredInit", "Python", "PythonTLSSnapshot"):
        torch._C._dispatch_tls_set_dispatch_key_included(key, False)
    for at, tensor in enumerate(program.tensors):
        tensor.mul_(-1)
        program.values[at] *= -1
    if reads:
        assert [tensor.numpy()[-1] for tensor in program.tensors] == program.values
    pool.step()
    program.iterate(usual)


def test_profile_has_the_operations_of_followed_iterations(pool: mempool.torch.TensorPool) -> None:
    """Even if the profile begins in the middle of an iteration."""
    program, usual = Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    with torch.profiler.profile() as whole:
        assert unseen_operations(pool, lambda: program.iterate(usual)) > COUNT
    program.iterate(usual, COUNT // 2)
    with torch.profiler.profile() as half:
        program.iterate(usual, COUNT - COUNT // 2)
    counts = [[one.name for one in profile.events()].count("aten::mul_") for profile in (whole, half)]
    assert counts == [COUNT, COUNT - COUNT // 2]


def test_iterations_that_draw_by_new_generators_are_followed(pool: mempool.torch.TensorPool) -> None:
    program, usual = Tensors(), list(range(COUNT))

    def work() -> None:
        program.iterate(usual)
        torch.randn(8, generator=torch.Generator().manual_seed(3))

    settle(pool, work)


def test_kept_results_of_followed_operations_are_no_foreign_memory(pool: mempool.torch.TensorPool) -> None:
    program, kept = Tensors(), [torch.ones(ELEMENTS)]

    def work() -> None:
        program.iterate(list(range(COUNT - 1)))
        kept[0] = kept[0] + 1

    settle(pool, work)
    before = mode_of(pool).iterations.limit_bytes
    iterate(pool, work, 2)
    assert mode_of(pool).follower.is_following
    assert mode_of(pool).iterations.limit_bytes == before


def test_two_kinds_of_iterations_are_both_followed(
    pool: mempool.torch.TensorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule learns no operations of the other kind, also where the kind was predicted wrongly.

    The number of iterations needed depends on the measured times of the copies.
    """
    program = Tensors()
    least, patterns = (COUNT, COUNT // 2), mode_of(pool).iterations.patterns

    def short() -> None:
        program.iterate(list(range(COUNT // 2)))
        program.tensors[0].neg()

    kinds = [lambda: program.iterate(list(range(COUNT))), short]
    for _ in range(120):
        if all(unseen_operations(pool, work) > count for work, count in zip(kinds, least, strict=True)):
            break
    long = max(patterns._patterns, key=lambda one: len(one.schedule))
    assert long.expected.is_ready
    long.expected = None
    monkeypatch.setattr(patterns, "predict_next", lambda: long)
    iterate(pool, short, 4)
    assert not long.expected.is_ready


def test_operations_between_marked_iterations_belong_to_none(pool: mempool.torch.TensorPool) -> None:
    program, usual = Tensors(), list(range(COUNT))

    def marked() -> None:
        with pool.iteration():
            program.iterate(usual)
        pool.plan_now()
        program.iterate(usual[: program.random.randrange(3)] or usual[:1])

    for _ in range(72):
        marked()
    before = swapping(pool)["followed"]
    for _ in range(8):
        marked()
    assert swapping(pool)["followed"] - before > 4 * COUNT


def test_forked_child_goes_on_in_the_middle_of_a_followed_iteration(pool: mempool.torch.TensorPool) -> None:
    program, usual = Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    program.iterate(usual[: COUNT // 2])
    if (child := os.fork()) == 0:
        try:
            program.iterate(usual)
        finally:
            os._exit(sys.exc_info()[0] is not None)
    assert os.waitpid(child, 0)[1] == 0
    program.iterate(usual)


def train(limit: int | None, steps: int = 40) -> tuple[list[float], list[torch.Tensor], dict[str, Any], int]:
    torch.manual_seed(0)
    pool = mempool.torch.install(limit=limit, background=False)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.GELU()) for _ in range(8)
    ]
    model, losses = torch.nn.Sequential(*layers), []
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, 64)
    for _ in range(steps):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        pool.plan_now()
    report = pool.report().to_dict()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    peak = pool.client.stats()["live"]["peak"]
    pool.close()
    return losses, parameters, report.get("swapping") or {}, peak


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_training_is_the_same_to_the_bit_and_within_the_limit(share: float) -> None:
    losses, parameters, _, peak = train(None)
    same, alike, values, _ = train(int(share * peak))
    assert values["followed"] > 200
    assert values["iteration_out_bytes"] > 0
    assert values["beyond"] == 0
    assert same == losses
    assert all(torch.equal(one, other) for one, other in zip(parameters, alike, strict=True))


def test_undeclared_writes_of_batch_norms_are_writes(
    install: Callable[[int], mempool.torch.TensorPool],
) -> None:
    """The schema does not declare the writes to the statistics, and their order differs from the schedule."""
    pool = install(BYTES * 12)
    order, numbers, expected = random.Random(0), list(range(4)), [0.0] * 4
    statistics = [(torch.zeros(ELEMENTS), torch.ones(ELEMENTS)) for _ in numbers]
    data = torch.ones(2, ELEMENTS)

    def work(numbers: list[int]) -> None:
        for number in numbers:
            mean, variance = statistics[number]
            torch.nn.functional.batch_norm(data * (number + 1), mean, variance, training=True, momentum=0.5)
            expected[number] = 0.5 * expected[number] + 0.5 * (number + 1)

    settle(pool, lambda: work(numbers))
    for _ in range(12):
        iterate(pool, lambda: work(order.sample(numbers, 4)), 1)
    assert swapping(pool)["iteration_out_bytes"] > 0
    assert [mean[0].item() for mean, _ in statistics] == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_kept_results_in_planned_places_exceed_no_limit(
    install: Callable[[int], mempool.torch.TensorPool], seed: int
) -> None:
    """The next results miss the plan and lie outside the arena, so other storages must be evicted first."""
    pool = install(BYTES * (COUNT - 4) + BYTES // 4)
    program, usual, kept = Tensors(seed), list(range(COUNT)), list[torch.Tensor]()
    settle(pool, lambda: program.iterate(usual))

    def work() -> None:
        program.iterate(usual)
        for _ in range(program.random.randrange(3)):
            kept.append(program.tensors[0] + 1)
        if program.random.random() < 0.3:
            kept.append(torch.full((program.random.randrange(1, 3) * ELEMENTS,), program.values[0] + 1))

    for _ in range(12):
        iterate(pool, work, 1)
    assert swapping(pool)["beyond"] == 0
    assert {one[0].item() for one in kept} <= {0.0, 2.0}
    assert all((one == one[0]).all() for one in kept)


def test_larger_results_than_of_the_expected_iteration_exceed_no_limit(
    install: Callable[[int], mempool.torch.TensorPool],
) -> None:
    """Both variants have the same beginning, and the arena has slots for one variant only."""
    pool = install(BYTES * (COUNT - 4) + BYTES // 4)
    program = Tensors()

    def usual() -> None:
        program.iterate(list(range(COUNT)))

    def other() -> None:
        program.iterate([0])
        torch.full((6 * ELEMENTS,), 1.0)

    settle(pool, usual)
    for _ in range(24):
        iterate(pool, other if program.random.random() < 0.3 else usual, 1)
    assert swapping(pool)["beyond"] == 0


def test_result_of_a_followed_operation_is_pinned_for_another_thread(
    pool: mempool.torch.TensorPool,
) -> None:
    """The mode has not seen the result, and learns of it only from the other thread."""
    program, usual, made = Tensors(), list(range(COUNT)), []

    def work() -> None:
        program.iterate(usual)
        made[:] = [program.tensors[0] * 0 + 2]

    settle(pool, work)
    iterate(pool, work, 1)
    mode, given = mode_of(pool), list[Any]()
    storage = made[0].untyped_storage()
    assert mode.storages.find(storage) is None
    thread = threading.Thread(target=mode.lend, args=(made[0], "aten::mul_.Tensor", True, given))
    thread.start()
    thread.join()
    mode.iterations.suspend()  # the mode sees operations again
    record = mode.storages.find(storage)
    assert record is not None
    assert record.pins == 1
    mode.eviction.clear(set(), mode.operations.clock)
    program.check(made[0], 2.0)
    assert record.state == RESIDENT
    mode.transfers.give_back(record, away=False, wrote=True)


def test_views_of_tensor_subclasses_are_dispatched_to_the_class(pool: mempool.torch.TensorPool) -> None:
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cls(func(*(one.inner if isinstance(one, cls) else one for one in args), **(kwargs or {})))

    torch.ones(4).view(2, 2)
    torch.ones(4).view(2, 2)  # registers the operation
    assert Wrapper(torch.arange(4.0)).view(2, 2).inner.tolist() == [[0.0, 1.0], [2.0, 3.0]]


# --- iterations that differ


def misses(pool: mempool.torch.TensorPool) -> int:
    return missed(pool.client.stats()["outcomes"])


def test_plan_is_followed_again_after_different_iterations(pool: mempool.torch.TensorPool) -> None:
    """Each evaluation has different operations, and moves tensors to addresses planned for others."""
    program, usual = Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    iterate(pool, lambda: program.iterate(usual), 2)
    for rounds in range(1, 5):
        kept = [one * 1 for one in program.tensors[::2]]
        for number, one in enumerate(kept):
            for _ in range(rounds):
                one.sub_(1)
            program.check(one, program.values[2 * number] - rounds)
        del kept, one
        iterate(pool, lambda: program.iterate(usual), 1)  # begins with the evaluation
        before = misses(pool)
        iterate(pool, lambda: program.iterate(usual), 1)
        assert unseen_operations(pool, lambda: program.iterate(usual)) > COUNT
        assert misses(pool) == before
        iterate(pool, lambda: program.iterate(usual), 1)
    assert swapping(pool)["beyond_bytes"] == 0
