"""The flight recorder: its file after a crash, the readers of the file, and its replay on the stand-in."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from answers import Cli

from mempool import Pool, UsageError, _core
from mempool.rehearsal.flight import replay
from mempool.rehearsal.standin import LIBRARY
from traces import EventType, TraceError
from traces.formats.flight import RECORD, read_records
from traces.read import read

MIB = 1 << 20
NOT_READY = 600
STRAY = 0.05  #: probability of each disturbance of a step


@pytest.fixture
def flight(tmp_path: Path) -> Iterator[Path]:
    """A file that records the calls of the test."""
    path = tmp_path / "run.flight"
    gc.collect()  # objects of an earlier test end before
    _core.begin_flight(str(path), 1 << 14)
    yield path
    _core.begin_flight("")


def step(client: _core.Client, rng: random.Random, driver: ctypes.CDLL, side: int, kept: list[int]) -> None:
    """Allocate like a training step, with unplanned buffers and uses by a second stream."""
    live: list[int] = []
    for size in range(MIB, 8 * MIB, 600_000):
        live.append(client.allocate(size))
        if rng.random() < STRAY:
            kept.append(client.allocate(rng.randrange(1, 4 * MIB)))
        if rng.random() < STRAY:
            client.use(live[0], side)
        if rng.random() < STRAY:
            driver.fake_fail(b"cuEventQuery", NOT_READY, rng.randrange(2), 3)
        if len(live) > 4:
            client.free(live.pop(0))
    for address in live:
        client.free(address)


def train(pool: Pool, rng: random.Random, driver: ctypes.CDLL, *, steps: int = 30) -> None:
    """Make steps on two threads, and plan on the way."""
    driver.fake_primary.restype = driver.fake_stream.restype = ctypes.c_void_p
    side = driver.fake_stream(ctypes.c_void_p(driver.fake_primary(0)), 0)
    kept: list[int] = []
    for number in range(steps):
        pool.step()
        if number % 3:
            step(pool.client, rng, driver, side, kept)
        else:
            thread = threading.Thread(target=step, args=(pool.client, rng, driver, side, kept))
            thread.start()
            thread.join()
        if number in (8, 20):
            pool.plan_now()
        if number % 7 == 6:
            rng.shuffle(kept)
            while len(kept) > 2:
                pool.client.free(kept.pop())
    for address in kept:
        pool.client.free(address)
    pool.release()


@pytest.mark.parametrize("memory", ["plain", "growing"])
@pytest.mark.parametrize("seed", range(3))
def test_replay_of_a_training_loop_gives_the_same_addresses_and_reserved_bytes(
    flight: Path, memory: str, seed: int
) -> None:
    device = _core.CudaDevice(0, driver=str(LIBRARY), memory=memory)
    with Pool(device, background=False) as pool:
        train(pool, random.Random(seed), ctypes.CDLL(str(LIBRARY)))
    _core.begin_flight("")
    read_back = read_records(flight)
    assert read_back.lost == 0
    assert (read_back.records["result"] == NOT_READY).sum() > 0
    assert {"install", "arena", "use", "cuMemCreate" if memory == "growing" else "cuMemAlloc_v2"} <= {
        read_back.names[number] for number in np.unique(read_back.records["call"])
    }
    count, differences = replay(flight)
    assert (count > 500, differences) == (True, [])
    changed = read_back.records["arguments"].copy()
    data = bytearray(flight.read_bytes())
    first = int(np.flatnonzero(read_back.calls("allocate"))[40])
    assert changed[first, 3] > 0
    at = 16384 + first * RECORD.itemsize + RECORD.fields["arguments"][1] + 24
    data[at] ^= 1  # the reserved bytes after an allocation
    flight.write_bytes(data)
    assert len(replay(flight)[1]) == 1


def test_replay_of_a_saved_plan_takes_the_arena_at_the_same_call(tmp_path: Path) -> None:
    """The device is as PyTorch's default: without an index, and plain if it lacks growing memory."""
    flight, plan, driver = tmp_path / "run.flight", tmp_path / "saved.plan", ctypes.CDLL(str(LIBRARY))
    with Pool(_core.CudaDevice(0, driver=str(LIBRARY), memory="growing"), background=False) as pool:
        train(pool, random.Random(1), driver)
        pool.save(plan)
    del pool
    gc.collect()
    _core.begin_flight(str(flight), 1 << 14)
    device = _core.CudaDevice(driver=str(LIBRARY), memory="growing", else_plain=True)
    with Pool(device, background=False, plan=plan) as pool:
        assert device.bind(0)
        pool.client.device_is_bound()
        train(pool, random.Random(1), driver, steps=6)
    _core.begin_flight("")
    recorded = read_records(flight)
    assert recorded.calls("arena").any()
    assert replay(flight)[1] == []


def test_replay_answers_with_the_recorded_lack_of_memory(flight: Path, cli: Cli) -> None:
    driver = ctypes.CDLL(str(LIBRARY))
    driver.fake_reset(1)
    driver.fake_set_capacity(0, ctypes.c_size_t(64 * MIB))
    pool = _core.Pool(device=_core.CudaDevice(0, driver=str(LIBRARY)))
    client = _core.Client(pool, "test")
    held = [client.allocate(size * MIB) for size in (30, 20, 20, 10)]
    assert [address != 0 for address in held] == [True, True, False, True]
    for address in filter(None, held):
        client.free(address)
    client.give_back(True)
    del client, pool
    _core.begin_flight("")
    assert replay(flight)[1] == []
    answer = cli.answer(f"info {flight}")
    last = answer["last_failures"]
    assert [(one["call"], one["result"]) for one in last] == [("cuMemAlloc_v2", 2)] * (len(last) - 1) + [
        ("allocate", 1)
    ]
    assert answer["calls"]["allocate"] == 4
    assert "cuMemAlloc_v2" in cli.run(f"info {flight}")[0]
    target = flight.with_suffix(".trace")
    cli.run(f"convert {flight} {target}")
    kinds = read(target).kind.tolist()
    assert [kinds.count(kind) for kind in (EventType.ALLOC, EventType.FREE, EventType.REFUSED)] == [3, 3, 1]


def test_file_of_a_killed_process_holds_its_newest_records(tmp_path: Path) -> None:
    path = tmp_path / "run.flight"
    program = f"""
        import os
        from mempool import _core
        _core.begin_flight({str(path)!r}, 64)
        client = _core.Client(_core.Pool(device=_core.HostDevice()), "test")
        for size in range(1, 101):
            client.allocate(size)
        if os.fork() == 0:
            client.allocate(7777)
            os._exit(0)
        os.wait()
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert done.returncode == -signal.SIGKILL
    flight = read_records(path)
    assert flight.lost > 0
    assert flight.records["arguments"][:, 0].tolist() == list(range(37, 101))
    assert (np.diff(flight.records["end_ns"].astype(np.int64)) >= 0).all()
    with pytest.raises(UsageError, match="has lost its first"):
        replay(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceError, match="cut off"):
        read_records(path)


def test_environment_starts_a_file_that_no_living_process_writes(tmp_path: Path, flight: Path) -> None:
    """Another process gets a file of its own; without calls of a pool there is none."""
    _core.Client(_core.Pool(device=_core.HostDevice()), "test").allocate(1)
    program = "import os; from mempool import _core; print(os.getpid())"
    work = "; _core.Client(_core.Pool(device=_core.HostDevice()), 'test').allocate(5)"
    for more, files in (("", [flight.name]), (work, [flight.name, f"{flight.name}.{{pid}}"])):
        done = subprocess.run(
            [sys.executable, "-c", program + more],
            env=os.environ | {"MEMPOOL_FLIGHT": str(flight)},
            capture_output=True,
            text=True,
            check=True,
        )
        names = [name.format(pid=done.stdout.strip()) for name in files]
        assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert json.dumps(read_records(tmp_path / names[1]).pid) == done.stdout.strip()
