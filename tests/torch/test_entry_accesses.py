"""Loops over single entries of tensors run without the mode, and with the right bytes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from followed_programs import (
    COUNT,
    ELEMENTS,
    LIMIT,
    Tensors,
    mode_of,
    settle,
    swapping,
    unseen_operations,
)

import mempool.torch
from mempool.torch.eager.storages import RELOADING, RESIDENT

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def pool(install: Callable[[int], mempool.torch.TensorPool]) -> mempool.torch.TensorPool:
    return install(LIMIT)


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


@pytest.mark.parametrize("moves_by", ["host", "native"])
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
