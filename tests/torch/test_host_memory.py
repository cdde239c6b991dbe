"""Host memory for copies: the free list against a model page by page, released pages, the default limit."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool._core import FreeList
from mempool.errors import UsageError
from mempool.torch.offload.host_memory import (
    PAGE,
    PIECE,
    PrivateMemory,
    available_bytes,
    default_host_limit,
    pages,
)

PAGES = 24
_SIZES = st.integers(1, 9 * PAGE)
STEPS = st.lists(
    st.one_of(
        *(st.tuples(st.just(name), _SIZES) for name in ("allocate", "allocate_last", "allocate_at")),
        st.tuples(st.just("release"), st.integers(0, 50)),
    ),
    max_size=60,
)


class PageModel:
    """An arena in which each page is taken or free."""

    def __init__(self) -> None:
        self.taken = [False] * PAGES

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return (begin, end) of the free ranges, in pages."""
        free = [False, *(not taken for taken in self.taken), False]
        edges = [page for page in range(PAGES + 1) if free[page] != free[page + 1]]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def expected(self, name: str, number: int) -> int | None:
        """Return the page at which an allocation of `number` bytes begins, or None."""
        count = pages(number) // PAGE
        if name == "allocate_at":
            begin = number % PAGES
            fits = begin + count <= PAGES and not any(self.taken[begin : begin + count])
            return begin if fits else None
        ranges = [(begin, end) for begin, end in self.free_ranges() if end - begin >= count]
        if name == "allocate":  # best fit
            return min(((end - begin, begin) for begin, end in ranges), default=(0, None))[1]
        return max((end - count for _, end in ranges), default=None)

    def set(self, at: int, size: int, *, taken: bool) -> None:
        count = pages(size) // PAGE
        self.taken[at // PAGE : at // PAGE + count] = [taken] * count


@given(STEPS)
def test_free_list_agrees_with_the_page_model(steps: list[tuple[str, int]]) -> None:
    free_list, model, living = FreeList(PAGES * PAGE), PageModel(), list[tuple[int, int]]()
    for name, number in steps:
        if name != "release":
            page = model.expected(name, number)
            at = None if page is None else page * PAGE
            if name == "allocate_at":
                assert free_list.allocate_at(number % PAGES * PAGE, number) == (at is not None)
            else:
                assert getattr(free_list, name)(number) == at
            if at is not None:
                model.set(at, number, taken=True)
                living.append((at, number))
        elif living:
            at, size = living.pop(number % len(living))
            free_list.release(at, size)
            model.set(at, size, taken=False)
        assert free_list.free_ranges() == [(begin * PAGE, end * PAGE) for begin, end in model.free_ranges()]
        assert free_list.used == sum(model.taken) * PAGE
    for at, size in living:
        free_list.release(at, size)
    assert free_list.free_ranges() == [(0, PAGES * PAGE)]


def test_take_peak_returns_the_high_water_mark_since_the_last_call() -> None:
    free_list = FreeList(PAGES * PAGE)
    assert (free_list.allocate(3 * PAGE), free_list.allocate(2 * PAGE)) == (0, 3 * PAGE)
    free_list.release(0, 3 * PAGE)
    assert free_list.take_peak() == 5 * PAGE
    assert free_list.take_peak() == 2 * PAGE


def test_release_excess_releases_only_pages_in_free_ranges() -> None:
    memory, free_list = PrivateMemory(200 * PIECE), FreeList(200 * PIECE)
    assert [free_list.allocate(count * PIECE) for count in (10, 180, 10)] == [0, 10 * PIECE, 190 * PIECE]
    free_list.release(10 * PIECE, 180 * PIECE)
    ctypes.memset(memory.address, 7, memory.size)
    memory.mark_touched(0, memory.size)

    memory.release_excess(160 * PIECE, free_list)  # too little to be worth the page faults
    assert memory.touched_bytes == memory.size

    memory.release_excess(20 * PIECE, free_list)
    held = [ctypes.c_char.from_address(memory.address + k * PIECE).value == b"\7" for k in range(200)]
    assert all(held[:10] + held[190:])
    assert sum(held) * PIECE == memory.touched_bytes < 30 * PIECE


def test_memory_beyond_the_address_space_is_refused() -> None:
    with pytest.raises(UsageError, match="the host has no"):
        PrivateMemory(1 << 60)


def test_untouched_memory_does_not_prevent_forks() -> None:
    """Loaders' workers are forked, though the kernel may merge the memories of several engines."""
    script = """
        import os
        from mempool.torch.offload.host_memory import PrivateMemory
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


def test_default_host_limit_is_half_of_the_free_memory_of_the_tightest_control_group(tmp_path: Path) -> None:
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
