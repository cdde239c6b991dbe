"""The same program under the default allocator, its peers and the pool, in processes that take turns."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rounds

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

import build

IN_TORCH = ("conv", "resnet", "unet", "seq2seq", "gpt", "bert", "llama")
COLUMNS = (
    *("allocator", "ms a step", "processor ms", "page faults", "resident MB", "of it code", "process MB"),
    "of the default's time",
)


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_enable"):
        pytest.skip("a benchmark: --benchmark-enable")


@pytest.mark.parametrize("workload", ["network", "wander", *IN_TORCH])
def test_allocators_side_by_side(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Results are the same; times are for reading, and gate nothing."""
    if workload in IN_TORCH:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    contenders = [rounds.Contender("glibc"), rounds.Contender("mempool", "pool")]
    contenders += [rounds.Contender("glibc, keeping", variables=rounds.KEEPING)]
    contenders += [
        rounds.Contender(name, preload=library) for name in rounds.PEERS if (library := rounds.preload(name))
    ]
    rounds.race(contenders, workload, steps=10, warm_up=3, rounds=8)
    rows = [
        (
            one.name,
            1e3 * one.median("seconds"),
            1e3 * one.median("cpu_seconds"),
            one.median("page_faults"),
            one.end["resident_bytes"] / 1e6,
            one.end["code_bytes"] / 1e6,
            f"{one.end['process_bytes'] / 1e6:.1f}",
            rounds.ratio(one, contenders[0]),
        )
        for one in contenders
    ]
    with capsys.disabled():
        print(rounds.table(workload, COLUMNS, rows))
    results = [[turn["results"] for turn in one.turns] for one in contenders]
    assert all(one == results[0] for one in results)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("buffers", [1_000, 4_000, 100_000])
def test_replay_through_the_c_entry_points(
    tmp_path: Path, buffers: int, threads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every allocation hits; nanoseconds are for reading."""
    if shutil.which(build.compiler()) is None:
        pytest.skip("no C++ compiler")
    program = build.build("replay_bench", tmp_path)
    done = subprocess.run(
        [str(program), str(buffers), str(threads), "5"], check=True, capture_output=True, text=True
    )
    said = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert said["hits"] >= 0.9999 * said["allocations"]
