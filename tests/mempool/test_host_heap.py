"""What planning leaves in the C library's heap goes back to the system, and nothing else does."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mempool import _core

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")

#: A thread, or the program, takes what glibc would keep and frees it, but for the blocks that are named.
LEAVES = """
import ctypes, sys, threading
from mempool import _core
from mempool.demo.worker import resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def taken(count):
    blocks = [libc.malloc(60_000) for _ in range(count)]
    for block in blocks:
        ctypes.memset(block, 7, 60_000)
    return blocks

def plans():
    before = resident_bytes("RssAnon")
    blocks = taken(400)
    alive = [blocks.pop(at) for at in map(int, sys.argv[3:])]
    for block in blocks:
        libc.free(block)
    held = resident_bytes("RssAnon") - before
    give_back()
    left = resident_bytes("RssAnon") - before
    assert all(ctypes.string_at(block, 60_000) == bytes([7]) * 60_000 for block in alive)
    again = taken(400 - len(alive))  # all can be had again
    for block in again:
        libc.free(block)
    reserved = resident_bytes("VmData")
    for _ in range(40):
        _core.give_back_host_heap()
    again = taken(400 - len(alive))
    assert resident_bytes("VmData") - reserved < 1 << 20  # and none of it is lost
    assert all(ctypes.string_at(block, 60_000) == bytes([7]) * 60_000 for block in alive + again)
    print(held, left)

def trims():
    libc.malloc_trim(0)

give_back = _core.give_back_host_heap if sys.argv[1] == "all" else trims
if sys.argv[2] == "thread":
    thread = threading.Thread(target=plans)
    thread.start()
    thread.join()
else:
    plans()
"""
#: As high as the thresholds come when a program has freed a mapping of 24 MiB.
RAISED = {"MALLOC_MMAP_THRESHOLD_": str(24 << 20), "MALLOC_TRIM_THRESHOLD_": str(48 << 20)}
ALIVE: list[list[int]] = [[], [0], [200], [100, 300], [399]]


def left(how: str, where: str, alive: list[int], **environment: str) -> int:
    """Bytes that are still there of 24 MB, after they have gone back so."""
    command = [sys.executable, "-c", LEAVES, how, where, *(str(at - i) for i, at in enumerate(alive))]
    around = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    around |= RAISED | environment
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=around).stdout
    held, still = map(int, said.split())
    assert held > 20 << 20, "glibc has kept nothing, so that nothing is shown"
    return still


@pytest.mark.parametrize("alive", ALIVE)
def test_what_a_thread_has_freed_goes_back_wherever_it_lies(alive: list[int]) -> None:
    # A page or two of each block that is asked for stay, of each that lives, and two blocks at the end.
    assert left("all", "thread", alive) < 1_300_000


def test_the_end_of_a_threads_arena_is_what_glibc_leaves() -> None:
    assert left("trimmed", "thread", [200]) > 2 * left("all", "thread", [200])


@pytest.mark.parametrize("alive", ALIVE)
@pytest.mark.parametrize(
    ("where", "environment"),
    [("main", {}), ("thread", {"MALLOC_ARENA_MAX": "1"}), ("thread", {"MALLOC_TRIM_THRESHOLD_": "65536"})],
)
def test_no_more_is_left_than_by_glibc(where: str, environment: dict[str, str], alive: list[int]) -> None:
    """Where it gives back the end itself; but for pages at the ends of a block or two."""
    assert left("all", where, alive, **environment) < left("trimmed", where, alive, **environment) + 100_000


def test_what_lives_is_left_alone_whoever_asks_meanwhile() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    done = threading.Event()

    def allocates(seed: int) -> int:
        choose, alive, wrong = random.Random(seed), list[tuple[int, int, int]](), 0
        for number in range(1500):
            if len(alive) > 40 or (alive and choose.random() < 0.45):
                block, size, mark = alive.pop(choose.randrange(len(alive)))
                wrong += ctypes.string_at(block, size) != bytes([mark]) * size
                libc.free(block)
            else:
                size, mark = int(2 ** choose.uniform(4, 19)), number % 251 + 1
                block = libc.malloc(size)
                ctypes.memset(block, mark, size)
                alive.append((block, size, mark))
            if number % 20 == 0:
                _core.give_back_host_heap()
        for block, size, mark in alive:
            wrong += ctypes.string_at(block, size) != bytes([mark]) * size
            libc.free(block)
        return wrong

    def gives_back() -> None:
        while not done.is_set():
            _core.give_back_host_heap()

    giving = threading.Thread(target=gives_back)
    giving.start()
    try:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(allocates, range(3))) == [0, 0, 0]
    finally:
        done.set()
        giving.join()
