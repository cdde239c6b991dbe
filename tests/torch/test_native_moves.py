"""Moves that the interposer makes without Python give the right bytes, whatever ends them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from followed_programs import (
    BYTES,
    COUNT,
    ELEMENTS,
    LIMIT,
    Network,
    Tensors,
    iterate,
    mode_of,
    settle,
    swapping,
)
from interrupts import interrupted_at

import mempool.torch
from mempool.torch.eager import native_moves

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def moves_by() -> str:
    return "native"


@pytest.fixture
def pool(install: Callable[[int], mempool.torch.TensorPool]) -> mempool.torch.TensorPool:
    return install(LIMIT)


def test_ctrl_c_on_any_line_of_the_beginning_of_native_moves_loses_nothing(
    pool: mempool.torch.TensorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, program, usual = mode_of(pool), Tensors(), list(range(COUNT))
    settle(pool, lambda: program.iterate(usual))
    begin, at = mode.transfers.native.begin, 0

    def begin_interrupted(*arguments: Any) -> None:
        if interrupted_at(at, lambda: begin(*arguments), frozenset((native_moves.__file__,))):
            raise KeyboardInterrupt

    monkeypatch.setattr(mode.transfers.native, "begin", begin_interrupted)
    while True:
        try:
            iterate(pool, lambda: program.iterate(usual), 20)
        except KeyboardInterrupt:
            for tensor, value in zip(program.tensors, program.values, strict=True):
                program.check(tensor, value)
            mode.transfers.end_native_moves()
            at += 1
        else:
            break
    assert at > 20


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


def test_resizing_a_new_storage_ends_native_moves(pool: mempool.torch.TensorPool) -> None:
    program, transfers = Tensors(), mode_of(pool).transfers
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 2)
    made = program.tensors[0] + program.tensors[1]
    assert transfers.makes_native_moves
    made.untyped_storage().resize_(2 * BYTES)
    assert not transfers.makes_native_moves


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


def test_schedule_without_moves_takes_no_host_memory(
    install: Callable[[int], mempool.torch.TensorPool],
) -> None:
    pool, program = install((COUNT + 3) * BYTES), Tensors()
    settle(pool, lambda: program.iterate(list(range(COUNT))))
    iterate(pool, lambda: program.iterate(list(range(COUNT))), 2)
    assert swapping(pool)["moves"] == 0
    assert not mode_of(pool).transfers.makes_native_moves


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


def test_operations_wait_for_copies_if_the_driver_refuses_to_let_the_stream_wait(
    pool: mempool.torch.TensorPool,
) -> None:
    program, usual, engine = Tensors(), list(range(COUNT)), mode_of(pool).engine
    settle(pool, lambda: program.iterate(usual))
    engine.refused = 0
    iterate(pool, lambda: program.iterate(usual), 6)
    assert engine.refused > COUNT
