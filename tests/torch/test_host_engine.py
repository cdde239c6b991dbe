"""Copies on the CPU have the right bytes in any order of requests, also in a forked child."""

from __future__ import annotations

import os
import threading
import traceback
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.torch.offload.engine import HostFullError
from mempool.torch.offload.host_engine import ArenaCopy, HostEngine, HostTransfer
from mempool.torch.offload.host_memory import PAGE, pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.torch.offload.engine import HostCopy

ROOM = 40 * PAGE


def data(size: int, seed: int) -> torch.Tensor:
    return ((torch.arange(size) * 31 + seed * 17) % 251).to(torch.uint8)


@pytest.fixture
def engine() -> Iterator[HostEngine]:
    made = HostEngine(ROOM)
    yield made
    made.close()


def hold(engine: HostEngine, way: int) -> Callable[[], None]:
    """Block one of the engine's threads until the returned function is called."""
    never = HostTransfer(0, ArenaCopy(0, 0), 0, 0, None)
    engine._queues[way].put(HostTransfer(0, ArenaCopy(0, 0), 0, 0, None, predecessor=never))
    return never.ended.set


@dataclass(eq=False)
class Kept:
    copy: HostCopy
    size: int
    seed: int


@given(st.lists(st.tuples(st.sampled_from("oobbdw"), st.integers(0, 1 << 16)), max_size=40))
def test_reload_restores_the_offloaded_bytes(steps: list[tuple[str, int]]) -> None:
    engine = HostEngine(ROOM)
    kept, asked, coming = list[Kept](), [], []
    for seed, (what, number) in enumerate(steps):
        if what == "o":
            size = number % (6 * PAGE) + 1
            try:
                copy, transfer = engine.offload(data(size, seed))
            except HostFullError:
                assert engine.host_bytes + pages(size) > ROOM // 2  # a hole may be too small, but not all are
                continue
            kept.append(Kept(copy, size, seed))
            asked.append(transfer)
        elif what == "w" and asked:
            engine.wait(asked.pop(number % len(asked)))
        elif kept and what == "b":
            one = kept[number % len(kept)]
            target = torch.empty(one.size, dtype=torch.uint8)
            coming.append((engine.reload(one.copy, target), target, one))
        elif kept and what == "d":
            engine.drop(kept.pop(number % len(kept)).copy)
    for transfer, target, one in coming:
        engine.wait(transfer)
        assert torch.equal(target, data(one.size, one.seed))
    for transfer in asked:
        engine.wait(transfer)
    for one in kept:
        engine.drop(one.copy)
    assert engine.host_bytes == 0
    engine.close()


def test_memory_of_a_copy_in_use_is_not_reused(engine: HostEngine) -> None:
    copy, transfer = engine.offload(data(ROOM, 1))
    engine.wait(transfer)
    go = hold(engine, 1)
    target = torch.empty(ROOM, dtype=torch.uint8)
    coming = engine.reload(copy, target)
    engine.drop(copy)
    with pytest.raises(HostFullError, match="for copies are left on the host"):
        engine.offload(data(ROOM, 2))
    go()
    engine.wait(coming)
    engine.offload(data(ROOM, 2))
    assert torch.equal(target, data(ROOM, 1))


def test_double_drop_frees_once(engine: HostEngine) -> None:
    copy, transfer = engine.offload(data(ROOM, 1))
    engine.wait(transfer)
    engine.drop(copy)
    engine.drop(copy)
    assert engine.host_bytes == 0


def test_reload_waits_for_the_offload(engine: HostEngine) -> None:
    go = hold(engine, 0)
    copy, _ = engine.offload(data(5000, 1))
    target = torch.zeros(5000, dtype=torch.uint8)
    coming = engine.reload(copy, target)
    assert not coming.ended.wait(0.05)
    go()
    assert engine.wait(coming) > 0
    assert torch.equal(target, data(5000, 1))
    assert engine.waited(coming) > 0


def test_finished_copies_release_their_data_without_a_wait(engine: HostEngine) -> None:
    left = data(5000, 1)
    gone = weakref.ref(left)
    _, transfer = engine.offload(left)
    del left
    transfer.ended.wait()
    engine.mark()
    assert gone() is None


def test_marks_exclude_waits(engine: HostEngine) -> None:
    go = hold(engine, 0)
    _, transfer = engine.offload(data(5000, 1))
    timer = threading.Timer(0.05, go)
    before = engine.mark()
    timer.start()
    waited = engine.wait(transfer)
    after = engine.mark()
    timer.join()
    assert engine.seconds([before, after])[0] < waited


def test_memory_unused_for_two_iterations_is_released() -> None:
    engine = HostEngine(256 << 20)
    copy, transfer = engine.offload(torch.ones(200 << 20, dtype=torch.uint8))
    engine.wait(transfer)
    engine.drop(copy)
    touched = []
    for _ in range(3):
        engine.end_iteration()
        touched.append(engine._memory.touched_bytes)
    assert touched[:2] == [200 << 20] * 2
    assert touched[2] < 70 << 20
    engine.close()


def test_link_is_measured_once(engine: HostEngine) -> None:
    link = engine.link()
    assert link is engine.link()
    assert 0 < link.out_per_byte < 1e-6
    assert 0 < link.in_per_byte < 1e-6


def test_collected_engines_leave_no_thread() -> None:
    def copying() -> int:
        return sum(thread.name.startswith("mempool-copy") for thread in threading.enumerate())

    before = copying()
    engine = HostEngine(ROOM)
    engine.wait(engine.offload(data(5000, 1))[1])
    assert copying() == before + 2
    del engine
    assert copying() == before


def in_child(act: Callable[[], bool]) -> bool:
    """Return whether a check holds in a forked child, which prints the reason of a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
        child = os.fork()
    if child == 0:
        held = False
        try:
            held = act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0 if held else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 0


def test_forked_child_finishes_pending_copies(engine: HostEngine) -> None:
    away, transfer = engine.offload(data(5000, 1))
    engine.wait(transfer)
    go, go_too = hold(engine, 0), hold(engine, 1)
    leaving, left = engine.offload(data(6000, 2))
    target = torch.zeros(6000, dtype=torch.uint8)
    coming = engine.reload(leaving, target)

    def child() -> bool:
        engine.wait(coming)
        engine.wait(left)
        mine = torch.zeros(5000, dtype=torch.uint8)
        engine.wait(engine.reload(away, mine))
        new, transfer = engine.offload(data(7000, 3))
        again = torch.zeros(7000, dtype=torch.uint8)
        engine.wait(transfer)
        engine.wait(engine.reload(new, again))
        engine.drop(away)
        wrong = engine.offload(data(5000, 9))  # would overwrite the parent's bytes if the memory were shared
        engine.wait(wrong[1])
        assert wrong[0].at == away.at
        engine.link()
        engine.close()
        return all(
            torch.equal(a, b)
            for a, b in ((target, data(6000, 2)), (mine, data(5000, 1)), (again, data(7000, 3)))
        )

    try:
        assert in_child(child)
    finally:
        go()
        go_too()
    engine.wait(coming)
    assert torch.equal(target, data(6000, 2))
    mine = torch.zeros(5000, dtype=torch.uint8)
    engine.wait(engine.reload(away, mine))
    assert torch.equal(mine, data(5000, 1))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2 * PAGE)), max_size=12))
def test_synchronous_and_asynchronous_copies_mix(steps: list[tuple[bool, int]]) -> None:
    """Reloaded bytes equal offloaded bytes, and all memory is returned."""
    engine = HostEngine(1 << 20)
    held = []
    for at_once, size in steps:
        data = torch.randint(256, (size,), dtype=torch.uint8)
        copy = engine.offload_now(data, size) if at_once else engine.offload(data)[0]
        held.append((copy, data.clone()))
    for copy, data in held:
        back = torch.zeros_like(data)
        if copy.filled_by is None:
            engine.reload_now(copy, back)
        else:
            engine.wait(engine.reload(copy, back))
        assert torch.equal(back, data)
        engine.drop(copy)
    engine.end_iteration()
    assert engine.host_bytes == 0
    engine.close()


def test_full_host_refuses_a_copy_at_once(engine: HostEngine) -> None:
    with pytest.raises(HostFullError):
        engine.offload_now(torch.zeros(1 << 30, dtype=torch.uint8), 1 << 30)


def test_single_core_makes_synchronous_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, all_of_them in (({0}, True), ({0, 1}, False)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        engine = HostEngine(1 << 20)
        assert (engine.sync_bytes > 1 << 40) == all_of_them
        engine.close()
