"""Schedules followed in C++ give the right bytes within the limit, and call Python only for moves."""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from interrupts import interrupted_at
from native_engine import NativeEngine

import mempool.torch
import mempool.torch.eager
from mempool.reporting.outcomes import missed
from mempool.torch.eager import native_moves
from mempool.torch.eager.storages import RELOADING, RESIDENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ELEMENTS, COUNT = 1 << 14, 12  #: of the tensors of `Tensors`
BYTES = 4 * ELEMENTS


class Tensors:
    """A loop over tensors of one shape, some of them offloaded, with the values that they must have."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.values = [float(number + 1) for number in range(COUNT)]
        self.tensors = [torch.full((ELEMENTS,), value) for value in self.values]

    def check(self, tensor: torch.Tensor, value: float) -> None:
        assert (tensor[0].item(), tensor[-1].item()) == (value, value)

    def iterate(self, order: list[int], count: int = COUNT) -> None:
        """Read and write the first `count` tensors in an order; operations and shapes are always the same."""
        for one, other in itertools.islice(zip(order, order[1:] + order[:1], strict=True), count):
            sums = self.tensors[one] + self.tensors[other]
            self.check(sums, self.values[one] + self.values[other])
            self.tensors[one].mul_(-1)
            self.values[one] *= -1
            self.check(self.tensors[one], self.values[one])

    def shuffled(self) -> list[int]:
        return self.random.sample(range(COUNT), COUNT)


@pytest.fixture(params=["host", "native"])
def install(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], mempool.torch.TensorPool]]:
    """Install pools whose moves Python makes, or the interposer with copies as late as allowed."""
    if request.param == "native":
        monkeypatch.setattr(mempool.torch.eager, "create_engine", lambda _, size: NativeEngine(size))
    pools: list[mempool.torch.TensorPool] = []

    def installed_pool(limit: int) -> mempool.torch.TensorPool:
        pools.append(mempool.torch.install(limit=limit, background=False))
        return pools[-1]

    yield installed_pool
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(install: Callable[[int], mempool.torch.TensorPool]) -> mempool.torch.TensorPool:
    return install(BYTES * (COUNT - 4) + BYTES // 2)


def mode_of(pool: mempool.torch.TensorPool) -> Any:
    assert pool.offloading is not None
    return pool.offloading.mode


def iterate(pool: mempool.torch.TensorPool, work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()
        pool.step()
        pool.plan_now()


def settle(pool: mempool.torch.TensorPool, work: Callable[[], None]) -> None:
    """Repeat an iteration until the mode sees none of its operations."""
    for _ in range(80):
        iterate(pool, work, 1)
        if mode_of(pool).follower.is_following:
            return
    raise AssertionError("no schedule is followed")


def swapping(pool: mempool.torch.TensorPool) -> dict[str, Any]:
    values: dict[str, Any] = pool.report().to_dict()["swapping"]
    return values


def unseen_operations(pool: mempool.torch.TensorPool, work: Callable[[], None]) -> int:
    """Run an iteration; return the number of operations unseen by the mode."""
    before = swapping(pool)["followed"]
    iterate(pool, work, 1)
    return int(swapping(pool)["followed"] - before)


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


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_ctrl_c_on_any_line_of_the_end_of_native_moves_loses_nothing(
    pool: mempool.torch.TensorPool,
) -> None:
    mode, program, usual = mode_of(pool), Tensors(), list(range(COUNT))
    at = 0
    while True:
        for _ in range(120):
            iterate(pool, lambda: program.iterate(usual), 1)
            if mode.transfers.makes_native_moves:
                break
        assert mode.transfers.makes_native_moves
        program.iterate(usual, COUNT // 2)
        if not interrupted_at(at, mode.transfers.end_native_moves, frozenset((native_moves.__file__,))):
            break
        assert [tensor.sum().item() for tensor in program.tensors] == [
            ELEMENTS * value for value in program.values
        ]
        pool.step()
        at += 1
    assert at > 10


class Network:
    """Training of a small network, whose steps an event may disturb."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        width = 128
        self.model = torch.nn.Sequential(
            *(part for _ in range(5) for part in (torch.nn.Linear(width, width), torch.nn.Tanh()))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        self.batch = torch.randn(256, width)
        self.losses: list[float] = []

    def disturb(self, event: str, hidden: torch.Tensor) -> None:
        """Use tensors that may be offloaded where the schedule expects no use."""
        weights = [*self.model.parameters()]
        if event == "threads":  # nothing sees the first operation of a thread
            for tensor in [one.data for one in (hidden, *weights)]:
                thread = threading.Thread(target=tensor.mul_, args=(1.01,))
                thread.start()
                thread.join()
        elif event == "thread":
            thread = threading.Thread(target=lambda: [one.sum() for one in (hidden, *weights)])
            thread.start()
            thread.join()
        elif event == "numpy":
            assert hidden.detach().numpy().sum() + sum(one.detach().numpy().sum() for one in weights) != 0
        elif event == "evaluation":
            with torch.no_grad():
                self.model(self.batch[:7])
        elif event == "fork":
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)

    def step(self, event: str = "", place: int = 0) -> None:
        """Train one step with an event between the layers (place 0) or between the passes (place 1)."""
        hidden = self.model[:4](self.batch)
        if place == 0:
            self.disturb(event, hidden)
        loss = self.model[4:](hidden).square().mean()
        if place == 1:
            self.disturb(event, hidden)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


@pytest.mark.parametrize("install", ["native"], indirect=True)
@pytest.mark.parametrize("place", range(2))
@pytest.mark.parametrize("event", ["threads", "thread", "numpy", "evaluation", "fork"])
def test_native_moves_that_end_anywhere_keep_the_losses(
    install: Callable[[int], mempool.torch.TensorPool], event: str, place: int
) -> None:
    pool = install(1_300_000)
    transfers, disturbed, program, plain = mode_of(pool).transfers, set[int](), Network(), Network()
    for at in range(24):
        if transfers.makes_native_moves:
            disturbed.add(at)
        program.step(event if at in disturbed else "", place)
        pool.plan_now()
    assert disturbed
    pool.close()
    for at in range(24):
        plain.step(event if at in disturbed else "", place)
    assert program.losses == plain.losses
    for one, other in zip(program.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)


def work_with_unread_results() -> Callable[..., None]:
    source = torch.ones(ELEMENTS)

    def work(kept: dict[int, torch.Tensor], count: int = 1, factors: int = 4) -> None:
        for factor in range(factors):
            first = source * factor
            for one in 2 * [source + number for number in range(6)]:
                one.mul_(2)
            del one
            kept[factor % count] = first * 3

    return work


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_native_moves_end_once_if_a_new_storage_switches_the_schedule(
    install: Callable[[int], mempool.torch.TensorPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, work = mode_of(pool := install(8 * BYTES + BYTES // 2)), work_with_unread_results()
    ends = list[Any]()
    settle(pool, lambda: work({}))
    iterate(pool, lambda: work({}), 2)
    work(kept := {}, 1, 2)
    native, register = mode.transfers.native, mode.transfers.native._register

    def register_other_size(*birth: Any) -> Any:
        monkeypatch.setattr(native, "_register", register)
        found = register(*birth)
        mode.iterations._switch()
        return found

    monkeypatch.setattr(native, "_register", register_other_size)
    monkeypatch.setattr(native, "count", lambda: ends.append(kept))
    mode.transfers.end_native_moves()
    assert len(ends) == 1


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_results_kept_longer_than_scheduled_have_their_bytes(
    install: Callable[[int], mempool.torch.TensorPool],
) -> None:
    """The schedule offloads results that are not read again, and then reuses the copies' memory."""
    pool = install(8 * BYTES + BYTES // 2)
    work = work_with_unread_results()
    settle(pool, lambda: work({}))
    iterate(pool, lambda: work({}), 2)
    calls = mode_of(pool).follower.calls
    iterate(pool, lambda: work({}), 1)
    assert mode_of(pool).follower.calls == calls
    work(kept := {}, 4)
    assert [one[-1].item() for one in kept.values()] == [0, 3, 6, 9]


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_resizing_a_new_storage_ends_native_moves(pool: mempool.torch.TensorPool) -> None:
    program, transfers = Tensors(), mode_of(pool).transfers
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 2)
    made = program.tensors[0] + program.tensors[1]
    assert transfers.makes_native_moves
    made.untyped_storage().resize_(2 * BYTES)
    assert not transfers.makes_native_moves


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_native_moves_of_another_table_are_not_made(pool: mempool.torch.TensorPool) -> None:
    """Ctrl-C at the beginning of an iteration may leave the moves of the last one's schedule."""
    mode, program, usual = mode_of(pool), Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    iterate(pool, lambda: program.iterate(usual), 2)
    table = mode.transfers.native.table
    assert table is not None
    mode.transfers.end_native_moves()
    table.handle += 1
    iterate(pool, lambda: program.iterate(usual), 2)
    calls = mode.follower.calls
    iterate(pool, lambda: program.iterate(usual), 1)
    assert mode.follower.calls > calls


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_schedule_without_moves_takes_no_host_memory(
    install: Callable[[int], mempool.torch.TensorPool],
) -> None:
    pool, program = install((COUNT + 3) * BYTES), Tensors()
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 2)
    assert swapping(pool)["moves"] == 0
    assert not mode_of(pool).transfers.makes_native_moves


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


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_operations_do_not_wait_for_another_thread_in_the_end_of_native_moves(
    pool: mempool.torch.TensorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation may hold Python's lock, which the other thread needs to release references to storages."""
    program, transfers = Tensors(), mode_of(pool).transfers
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 2)
    program.iterate(list(range(COUNT)), COUNT // 2)
    begun, goes_on, results = threading.Event(), threading.Event(), list[bool]()
    make, end = mode_of(pool).engine.make, transfers.end_native_moves

    def make_late(event: int) -> None:
        begun.set()
        results.append(goes_on.wait(20))
        make(event)

    def end_here() -> None:
        goes_on.set()
        end()

    monkeypatch.setattr(mode_of(pool).engine, "make", make_late)
    (thread := threading.Thread(target=end)).start()
    assert begun.wait(20)
    monkeypatch.setattr(transfers, "end_native_moves", end_here)
    program.iterate(list(range(COUNT // 2, COUNT)))
    thread.join()
    assert all(results)


@pytest.mark.parametrize("install", ["native"], indirect=True)
def test_storages_return_from_native_moves_to_the_stream_of_the_program(
    install: Callable[[int], mempool.torch.TensorPool],
) -> None:
    """Another thread ends the moves: a reload on its stream would take memory that it may reuse too early."""
    mode, program, streams = mode_of(pool := install(1_300_000)), Network(), set[int]()

    def end(_: str, hidden: torch.Tensor) -> None:
        if mode.transfers.makes_native_moves:
            thread = threading.Thread(target=mode.transfers.end_native_moves)
            thread.start()
            thread.join()
            streams.update(one.stream for one in mode.storages.records.values() if one.birth is not None)

    program.disturb = end  # type: ignore[method-assign]
    for _ in range(24):
        program.step("", 1)
        pool.plan_now()
    assert streams == {threading.get_ident()}


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


# --- loops over single entries

REPEATED = 64  #: operations with one signature that an iteration records


def add_entries(target: torch.Tensor, source: torch.Tensor, count: int) -> None:
    for at in range(count):
        target[at] += source[-1 - at]


@pytest.mark.parametrize("indexed", [False, True])  # by a tensor, read by a composite operation
def test_repeated_operations_on_entries_run_without_the_mode(
    pool: mempool.torch.TensorPool, indexed: bool
) -> None:
    target, source, index = torch.zeros(ELEMENTS), torch.ones(ELEMENTS), torch.arange(ELEMENTS)
    target.add_(source)
    pool.step()
    before = mode_of(pool).operations.clock
    for at in range(1000):
        target[index[at] if indexed else at] += source[at]
    assert mode_of(pool).operations.clock - before <= 2 * REPEATED + 2  # an addition and a copy are recorded
    assert target.sum().item() == ELEMENTS + 1000


def test_entries_of_a_storage_on_the_host_have_its_bytes(pool: mempool.torch.TensorPool) -> None:
    """Entries of an offloaded storage are read and written on the host, without evictions."""
    program, target, source = Tensors(), torch.zeros(ELEMENTS), torch.arange(float(ELEMENTS))
    mode, expected = mode_of(pool), torch.zeros(ELEMENTS).numpy().copy()
    add_entries(target, source, REPEATED + 9)
    expected[: REPEATED + 9] += source.numpy()[::-1][: REPEATED + 9]
    for step in range(6):
        mode.eviction.clear(set(), mode.operations.clock)
        target.mul_(-1)
        expected *= -1
        if step % 2:
            mode.eviction.clear(set(), mode.operations.clock)
        before, moved = mode.operations.clock, mode.counts.in_bytes
        add_entries(target, source, 50)
        expected[:50] += source.numpy()[::-1][:50]
        assert mode.operations.clock - before <= 50
        assert mode.counts.in_bytes == moved
        mode.eviction.clear(set(), mode.operations.clock)
        assert target.tolist() == expected.tolist()
    program.check(program.tensors[3], program.values[3])


def test_schedules_keep_storages_whose_entries_are_accessed(pool: mempool.torch.TensorPool) -> None:
    program, usual = Tensors(), list(range(COUNT))
    target, source = torch.zeros(ELEMENTS), torch.ones(ELEMENTS)
    total = [0.0]

    def work() -> None:
        program.iterate(usual)
        target.add_(source)
        add_entries(target, source, 40 * REPEATED)
        total[0] += 1.0

    settle(pool, work)
    before = swapping(pool)
    assert unseen_operations(pool, work) > 2 * REPEATED
    after = swapping(pool)
    assert after["on_demand"] == before["on_demand"]
    assert after["diverged"] == before["diverged"]
    assert target.sum().item() == total[0] * (ELEMENTS + 40 * REPEATED)


def test_accesses_of_unrecorded_operations_count_for_the_operation_before(
    pool: mempool.torch.TensorPool,
) -> None:
    target, source = torch.zeros(ELEMENTS), torch.ones(ELEMENTS)
    other = torch.ones(ELEMENTS)
    pool.step()
    add_entries(target, source, 2 * REPEATED)
    other.mul_(2)
    add_entries(target, source, REPEATED)
    other.mul_(2)
    recording = mode_of(pool).iterations.current
    last = len(recording) - 2  # the first of the two multiplications
    of_last = {number for number, at, _ in recording.accesses() if at == last}
    written = {number for number, at, wrote in recording.accesses() if at == last and wrote}
    records = mode_of(pool).storages
    numbers = [records.find(one.untyped_storage()).number for one in (target, source, other)]
    assert of_last == set(numbers)
    assert written == {numbers[0], numbers[2]}


def test_entries_changed_in_another_thread_keep_their_values(pool: mempool.torch.TensorPool) -> None:
    target, source = torch.zeros(ELEMENTS), torch.ones(ELEMENTS)
    add_entries(target, source, 2 * REPEATED)
    thread = threading.Thread(target=add_entries, args=(target, source, 2 * REPEATED))
    thread.start()
    thread.join()
    mode_of(pool).eviction.clear(set(), mode_of(pool).operations.clock)
    assert target.sum().item() == 4 * REPEATED


@pytest.mark.parametrize("whole", [True, False])
def test_repeated_operations_on_large_or_other_storages_are_recorded(
    pool: mempool.torch.TensorPool, whole: bool
) -> None:
    program = Tensors()
    pool.step()
    before, rounds = mode_of(pool).operations.clock, 3 * REPEATED
    for _ in range(rounds):
        for tensor in program.tensors[:1] if whole else program.tensors:
            (tensor if whole else tensor[0]).mul_(1)
    assert mode_of(pool).operations.clock - before == rounds * (1 if whole else COUNT)


def test_entries_of_a_storage_on_the_way_back_wait_for_the_reload(pool: mempool.torch.TensorPool) -> None:
    target, source = torch.zeros(ELEMENTS), torch.ones(ELEMENTS)
    add_entries(target, source, 2 * REPEATED)
    mode = mode_of(pool)
    mode.eviction.clear(set(), mode.operations.clock)
    record = mode.storages.find(target.untyped_storage())
    mode.transfers.reload(record)
    assert record.state == RELOADING
    target[0] += source[0]
    assert record.state == RESIDENT
    assert target[0].item() == 2


def test_entries_written_while_another_thread_reloads_are_kept(
    pool: mempool.torch.TensorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reload copies between the main thread's look at the storage and the write into the host copy."""
    target, source, mode = torch.zeros(ELEMENTS), torch.ones(ELEMENTS), mode_of(pool)
    record, find = mode.storages.find(target.untyped_storage()), mode.reload
    add_entries(target, source, REPEATED + 9)

    def reload(absent: list[torch.Tensor]) -> None:
        find(absent)
        mode.transfers.reload(record)
        record.transfer.ended.wait()

    mode.eviction.clear(set(), mode.operations.clock)
    monkeypatch.setattr(mode, "reload", reload)
    target[0].add_(source[0])
    assert target.sum().item() == REPEATED + 10


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
