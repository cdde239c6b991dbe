"""Redzones, poison and quarantine find each wrong write or free, and name the source lines."""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import outcome, start
from hypothesis import given
from hypothesis import strategies as st

import mempool.numpy
from mempool import Pool, UsageError, _core

MIB = 1 << 20


@pytest.fixture
def checked() -> _core.Checked:
    return _core.Checked(_core.Client(_core.Pool(device=_core.HostDevice()), "checked"))


@pytest.fixture
def pool() -> Iterator[mempool.numpy.ArrayPool]:
    with mempool.numpy.install(check=True, background=False) as pool:
        yield pool


def poke(address: int, value: int = 65) -> None:
    ctypes.memset(address, value, 1)


class TestBuffers:
    def test_correct_use_has_no_faults(self, checked: _core.Checked) -> None:
        live = []
        for n in range(3000):
            live.append((address := checked.allocate(n), n))
            ctypes.memset(address, n % 251, n)
            if n % 3 == 0:
                assert checked.free(live.pop(n % len(live))[0])
        checked.verify()
        for address, n in live:
            assert ctypes.string_at(address, n) == bytes([n % 251]) * n
            assert checked.free(address)
        checked.flush()
        assert checked.faults_found() == 0

    @given(size=st.integers(0, 300), offset=st.integers(-64, 400), value=st.integers(0, 255))
    def test_byte_written_beside_a_buffer_is_reported_at_its_offset(
        self, size: int, offset: int, value: int
    ) -> None:
        client = _core.Client(_core.Pool(device=_core.HostDevice()), "checked")
        checked = _core.Checked(client)
        address = checked.allocate(size)
        assert address % 64 == 0
        if offset >= size + 64:
            offset = size + 63
        before = ctypes.string_at(address + offset, 1)[0]
        poke(address + offset, value)
        outside = not 0 <= offset < size and value != before
        checked.free(address)
        expected = [("past_end" if offset >= 0 else "before_begin", address, size, offset)] if outside else []
        assert [fault[:4] for fault in checked.faults()] == expected

    @given(size=st.integers(1, 100_000), where=st.floats(0, 1), value=st.integers(0, 255))
    def test_write_after_the_free_is_found_before_the_memory_is_reused(
        self, size: int, where: float, value: int
    ) -> None:
        core = _core.Pool(device=_core.HostDevice())
        checked = _core.Checked(_core.Client(core, "checked"))
        address, offset = checked.allocate(size), int(where * (size - 1))
        checked.free(address)
        poison = ctypes.string_at(address + offset, 1)[0]
        poke(address + offset, value)
        checked.flush()
        assert core.stats()["live_blocks"] == 0
        expected = [] if value == poison else [("after_free", address, size, offset)]
        assert [fault[:4] for fault in checked.faults()] == expected

    @pytest.mark.parametrize("offset", [-64, -1, 1, 500, 1000, 1063])
    def test_double_free_and_free_inside_a_buffer_are_refused_and_reported(
        self, checked: _core.Checked, offset: int
    ) -> None:
        mine = ctypes.create_string_buffer(100)
        assert not checked.free(ctypes.addressof(mine))
        assert checked.faults_found() == 0  # a free of a foreign address is no fault
        address = checked.allocate(1000)
        assert not checked.free(address + offset)
        assert [(fault[0], fault[3]) for fault in checked.faults()] == [("inside", offset)]
        assert checked.free(address)
        assert not checked.free(address)
        assert [fault[0] for fault in checked.faults()] == ["inside", "double_free"]

    def test_each_fault_is_found_once_and_the_list_is_bounded(self, checked: _core.Checked) -> None:
        addresses = [checked.allocate(10) for _ in range(1000)]
        for address in addresses:
            poke(address + 10)
        for _ in range(3):
            checked.verify()
        assert checked.faults_found() == 1000
        assert len(checked.faults()) == 256

    def test_quarantine_is_bounded_and_delays_reuse_of_addresses(self) -> None:
        core = _core.Pool(device=_core.HostDevice())
        checked = _core.Checked(_core.Client(core, "checked"))
        seen: list[int] = []
        for _ in range(10_000):
            address = checked.allocate(100)
            assert address not in seen[-1000:]
            seen.append(address)
            checked.free(address)
        assert core.stats()["live_blocks"] <= 4097
        for _ in range(40):
            checked.free(checked.allocate(4 * MIB))
            checked.free(checked.allocate(40 * MIB))
        assert core.stats()["reserved"]["current"] < 80 * MIB

    def test_quarantine_makes_room_before_a_request_is_refused(self) -> None:
        core = _core.Pool(device=_core.HostDevice(), max_reserved=32 * MIB)
        checked = _core.Checked(_core.Client(core, "checked"))
        for _ in range(20):
            address = checked.allocate(8 * MIB)
            assert address != 0
            checked.free(address)
        assert checked.allocate(64 * MIB) == 0


def line(offset: int = 0) -> str:
    """Return the caller's file and line, in the form of a fault."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + offset}"


class TestArrays:
    def test_write_past_the_end_names_allocation_and_free(self, pool: mempool.numpy.ArrayPool) -> None:
        allocated, array = line(), np.ones(100)
        address = array.ctypes.data
        poke(address + 800)
        noticed = line(+1)
        del array
        (fault,) = pool.faults()
        assert (fault.kind, fault.address) == ("past_end", address)
        assert (fault.size_bytes, fault.offset_bytes) == (800, 800)
        assert (fault.allocated_at, fault.freed_at, fault.noticed_at) == (allocated, None, noticed)
        assert str(fault).startswith(f"write past the end, at byte 800, noticed at {noticed}: 800 bytes")

    def test_write_after_the_free_names_allocation_and_free(self, pool: mempool.numpy.ArrayPool) -> None:
        allocated, array = line(), np.zeros((10, 10))
        address = array.ctypes.data
        freed = line(+1)
        del array
        poke(address + 5)
        (fault,) = pool.faults()
        assert (fault.kind, fault.offset_bytes) == ("after_free", 5)
        assert (fault.allocated_at, fault.freed_at) == (allocated, freed)

    def test_report_and_log_name_the_faults(
        self, pool: mempool.numpy.ArrayPool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.ERROR, "mempool"):
            array = np.ones(100)
            poke(array.ctypes.data - 1)
            del array
            for _ in range(1000):  # wait for the main thread
                pass
            told = [record.getMessage() for record in caplog.records]
        assert len(told) == 1
        assert "write before the beginning, at byte -1" in told[0]
        report = pool.report()
        assert len(report.to_dict()["faults"]) == 1
        assert "write before the beginning" in str(report)
        assert "write before the beginning" in report._repr_html_()
        pool.close()
        assert len(caplog.records) == 1

    def test_faults_of_living_arrays_come_out_at_the_end(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.ERROR, "mempool"), mempool.numpy.install(check=True) as pool:
            array = np.ones(100)
            poke(array.ctypes.data + 801)
        assert ["write past the end" in record.getMessage() for record in caplog.records] == [True]
        del array
        assert len(pool.faults()) == 1

    def test_threads_and_collections_without_a_fault(self, pool: mempool.numpy.ArrayPool) -> None:
        class Node:
            def __init__(self) -> None:
                self.me, self.array = self, np.ones(400)

        def fails() -> None:
            np.ones(100)[:50] + np.ones(50)
            raise KeyError("mine")

        def work() -> None:
            for size in range(300):
                with pytest.raises(KeyError, match="mine"):  # which passes through a dying array
                    fails()
                array = np.arange(size)
                array.resize(2 * size + 1, refcheck=False)
                assert array[:size].tolist() == list(range(size))
                assert not np.zeros(size).any()
                Node()

        old = gc.get_threshold()
        gc.set_threshold(7, 2, 2)
        try:
            threads = [threading.Thread(target=work) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            gc.set_threshold(*old)
        gc.collect()
        assert pool.faults() == ()


KEPT = """
import ctypes
import numpy as np, mempool.numpy
pool = mempool.numpy.install()
kept = np.ones(100)
ctypes.memset(kept.ctypes.data + 800, 0, 8)
"""
FORKS = """
import os, threading, warnings
import numpy as np, mempool.numpy
warnings.simplefilter("ignore", DeprecationWarning)
pool = mempool.numpy.install(background=False)
kept = [np.arange(n) for n in range(100)]
def busy():
    while True: np.ones(300).sum()
for _ in range(2): threading.Thread(target=busy, daemon=True).start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        kept[50].resize(200, refcheck=False)
        kept.clear()
        os._exit(len(pool.faults()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_end_of_the_interpreter_reports_faults_on_stderr_and_none_where_there_are_none(
    tmp_path: Path,
) -> None:
    """The program has no logging code; a forked child reports no faults of its parent."""
    done = outcome(start(tmp_path, "-c", KEPT, MEMPOOL_CHECK="1"))
    assert done.status == 0
    assert done.stderr.startswith("mempool: numpy: write past the end, at byte 800")
    assert "allocated at <string>:5" in done.stderr
    done = outcome(start(tmp_path, "-c", FORKS, MEMPOOL_CHECK="1"))
    assert (done.status, done.stderr) == (0, "")


def test_faults_of_a_pool_without_a_framework_are_named_and_survived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Pool(check=True, background=False) as pool:
        address = pool.allocate(1000)
        poke(address + 1000)
        pool.free(address)
        with pytest.raises(ValueError, match="not a live buffer"):
            pool.free(address)
        assert [fault.kind for fault in pool.faults()] == ["past_end", "double_free"]
        assert all(__file__ in str(fault.allocated_at) for fault in pool.faults())
        assert len(pool.report().to_dict()["faults"]) == 2
        pool.free(pool.allocate(1000))
    assert "past the end" in caplog.text
    with pytest.raises(UsageError, match="host"):
        Pool(_core.SimulatedDevice(), check=True, background=False)
