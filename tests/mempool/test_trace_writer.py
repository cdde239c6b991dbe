"""Trace tape: every event once and in order, in bounded memory as long as the disk has room."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cores import Core

from mempool.recording.events import RECORD


@pytest.mark.parametrize("piece", [1, 7, 64, 10_000])
def test_tape_on_disk_equals_the_tape_in_memory(tmp_path: Path, piece: int) -> None:
    cores = [Core(), Core()]
    cores[0].client.set_tracing(True)
    cores[1].client.set_tracing(True, folder=str(tmp_path), piece=piece)
    taken: list[list[np.ndarray]] = [[], []]

    def take() -> None:
        for core, kept in zip(cores, taken, strict=True):
            while packed := core.client.take_trace():
                kept.append(np.frombuffer(packed, RECORD))

    rng = random.Random(piece)
    for _ in range(1000):
        size = rng.randrange(1, 5000)
        for core in cores:
            core.free(core.allocate(size))
        if rng.random() < 0.03:
            take()
    take()
    assert list(tmp_path.iterdir()) == []  # it has no name
    memory, file = (np.concatenate(kept) for kept in taken)
    assert len(file) == 2000
    assert max(map(len, taken[1])) <= piece
    np.testing.assert_array_equal(file["index"], np.arange(2000))
    for name in ("kind", "size", "stream", "sequence"):
        np.testing.assert_array_equal(file[name], memory[name])
    assert cores[1].client.state()["trace_lost"] == 0


def test_tape_stays_in_memory_where_no_file_can_be_made(tmp_path: Path) -> None:
    core = Core()
    core.client.set_tracing(True, folder=str(tmp_path / "nowhere"), piece=10)
    for _ in range(100):
        core.free(core.allocate(1000))
    assert len(np.frombuffer(core.client.take_trace(), RECORD)) == 200
    assert core.client.state()["trace_lost"] == 0


def test_disk_space_is_returned(tmp_path: Path) -> None:
    core = Core()
    core.client.set_tracing(True, folder=str(tmp_path), piece=10)

    def in_files() -> list[int]:
        links = list(Path("/proc/self/fd").iterdir())
        ours = [link for link in links if link.is_symlink() and str(tmp_path) in str(link.readlink())]
        return [link.stat().st_size for link in ours]

    for _ in range(50):
        core.free(core.allocate(1000))
    assert in_files() == [100 * RECORD.itemsize]
    while core.client.take_trace():
        pass
    assert in_files() == [0]
    for _ in range(50):
        core.free(core.allocate(1000))
    core.client.set_tracing(False)
    assert len(in_files()) == 1
    while core.client.take_trace():
        pass
    assert in_files() == []


def test_events_lost_to_a_full_disk_are_counted(tmp_path: Path) -> None:
    """A limit on the file size stands in for a full disk; the recording then ends without a file."""
    program = f"""if True:
        import logging, resource, signal, numpy as np, mempool.numpy
        logging.disable()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        pool = mempool.numpy.install(record={str(tmp_path / "t.trace")!r}, background=False)
        for _ in range(300_000): np.ones(100)
        try:
            pool.close()
        except (MemoryError, OSError) as error:
            print(type(error).__name__, pool.client.state()["trace_lost"] > 0)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split()[1:] == ["True"]
    assert list(tmp_path.iterdir()) == []


def test_program_with_allocations_only_is_recorded_in_bounded_memory(tmp_path: Path) -> None:
    """Nobody writes the trace meanwhile: waiting records are in the file."""
    program = """if True:
        import os, sys, numpy as np
        from mempool import _core
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        device = _core.SimulatedDevice()
        client = _core.Client(_core.Pool(device=device), "test")
        client.set_tracing(True, folder=sys.argv[1])
        allocate, free = client.allocate, client.free
        for k in range(1_500_000):
            free(allocate(1000))
            if k == 200_000: before = resident()
        print(resident() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 24 << 20  # two pieces; in memory it would be 140 MiB
