"""The arena of the host's copies: best fit, and pages that go back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.errors import UsageError
from mempool.torch.offload.free_list import PAGE, Holes, pages
from mempool.torch.offload.host_limit import available_bytes, default_host_limit
from mempool.torch.offload.private_memory import PIECE, PrivateMemory

if TYPE_CHECKING:
    from pathlib import Path

PAGES = 24
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 9 * PAGE)),
        st.tuples(st.just("take last"), st.integers(1, 9 * PAGE)),
        st.tuples(st.just("take at"), st.integers(1, 9 * PAGE)),
        st.tuples(st.just("give"), st.integers(0, 50)),
    ),
    max_size=60,
)


class Slow:
    """Each page by itself."""

    def __init__(self) -> None:
        self.taken = [False] * PAGES

    def holes(self) -> list[tuple[int, int]]:
        """(begin, end) in pages."""
        edges = [k for k in range(PAGES + 1) if self._is(k) != self._is(k - 1)]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _is(self, page: int) -> bool:
        return 0 <= page < PAGES and not self.taken[page]

    def place(self, count: int) -> int | None:
        """Where so many pages go."""
        fits = [(end - begin, begin) for begin, end in self.holes() if end - begin >= count]
        return min(fits)[1] if fits else None

    def set(self, at: int, count: int, taken: bool) -> None:
        self.taken[at : at + count] = [taken] * count


@given(STEPS)
def test_it_is_best_fit(steps: list[tuple[str, int]]) -> None:
    holes, slow, living = Holes(PAGES * PAGE), Slow(), list[tuple[int, int]]()
    for what, number in steps:
        if what in ("take", "take last"):
            count = pages(number) // PAGE
            if what == "take":
                at, expected = holes.take(number), slow.place(count)
            else:
                ends = [end for begin, end in slow.holes() if end - begin >= count]
                at, expected = holes.take_last(number), max(ends) - count if ends else None
            assert at == (None if expected is None else expected * PAGE)
            if at is not None:
                slow.set(at // PAGE, count, taken=True)
                living.append((at, number))
        elif what == "take at":
            begin, count = number % PAGES, pages(number) // PAGE
            free = begin + count <= PAGES and not any(slow.taken[begin : begin + count])
            assert holes.take_at(begin * PAGE, number) == free
            if free:
                slow.set(begin, count, taken=True)
                living.append((begin * PAGE, number))
        elif living:
            at, size = living.pop(number % len(living))
            holes.give(at, size)
            slow.set(at // PAGE, pages(size) // PAGE, taken=False)
        assert holes.free() == [(begin * PAGE, end * PAGE) for begin, end in slow.holes()]
        assert holes.used == sum(slow.taken) * PAGE
    for at, size in living:
        holes.give(at, size)
    assert holes.free() == [(0, PAGES * PAGE)]


def test_an_arena_without_bytes_has_no_place() -> None:
    assert Holes(0).take(1) is None
    assert Holes(0).take_last(1) is None
    assert Holes(0).free() == []


def test_the_most_at_once_is_counted_from_one_question_to_the_next() -> None:
    holes = Holes(PAGES * PAGE)
    first, second = holes.take(3 * PAGE), holes.take(2 * PAGE)
    assert first is not None
    assert second is not None
    holes.give(first, 3 * PAGE)
    assert holes.rested() == 5 * PAGE
    assert holes.rested() == 2 * PAGE


def test_pages_of_holes_go_back_and_no_others() -> None:
    memory, holes = PrivateMemory(200 * PIECE), Holes(200 * PIECE)
    assert [holes.take(count * PIECE) for count in (10, 180, 10)] == [0, 10 * PIECE, 190 * PIECE]
    holes.give(10 * PIECE, 180 * PIECE)
    ctypes.memset(memory.address, 7, memory.size)
    memory.touch(0, memory.size)

    memory.keep(160 * PIECE, holes)  # what is left over is not worth it
    assert memory.touched_bytes == memory.size

    memory.keep(20 * PIECE, holes)
    held = [ctypes.c_char.from_address(memory.address + k * PIECE).value == b"\7" for k in range(200)]
    assert all(held[:10] + held[190:])
    assert sum(held) * PIECE == memory.touched_bytes < 30 * PIECE


def test_more_than_there_are_addresses_is_refused() -> None:
    with pytest.raises(UsageError, match="the host has no"):
        PrivateMemory(1 << 60)


def test_memory_that_is_not_touched_keeps_no_process_from_forking() -> None:
    """As loaders' workers are: though the kernel may see the memories of several engines as one mapping."""
    script = """
        import os
        from mempool.torch.offload.private_memory import PrivateMemory
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        kept = [PrivateMemory(most * 6 // 10) for _ in range(3)]
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_hosts_limit_is_half_of_what_is_free_in_the_tightest_group(tmp_path: Path) -> None:
    system = write(tmp_path / "a", proc__meminfo="MemTotal: 900 kB\nMemAvailable:  600 kB\n")
    assert available_bytes(system) == 600 << 10
    assert default_host_limit(system) == 300 << 10
    group = {
        "proc__self__cgroup": "0::/jobs/one\n",
        "sys__fs__cgroup__jobs__memoryDOTmax": "300000\n",
        "sys__fs__cgroup__jobs__memoryDOTcurrent": "200000\n",
        "sys__fs__cgroup__jobs__memoryDOTstat": "inactive_file 50000\n",
        "sys__fs__cgroup__jobs__one__memoryDOTmax": "max\n",
        "sys__fs__cgroup__jobs__one__memoryDOTcurrent": "150000\n",
    }
    assert available_bytes(write(system, **group)) == 150000
    older = {
        "sys__fs__cgroup__memory__memoryDOTlimit_in_bytes": "5000\n",
        "sys__fs__cgroup__memory__memoryDOTusage_in_bytes": "6000\n",
    }
    assert available_bytes(write(system, **older)) == 0
    assert available_bytes(tmp_path / "nothing") > 0
