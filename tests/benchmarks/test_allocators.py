"""Times of one program under the default allocator, its peers and the pool, in alternating processes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import rounds

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
    """Assert equal results; times are printed and gate nothing."""
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
            contender.name,
            1e3 * contender.median("seconds"),
            1e3 * contender.median("cpu_seconds"),
            contender.median("page_faults"),
            contender.end["resident_bytes"] / 1e6,
            contender.end["code_bytes"] / 1e6,
            f"{contender.end['process_bytes'] / 1e6:.1f}",
            rounds.ratio(contender, contenders[0]),
        )
        for contender in contenders
    ]
    with capsys.disabled():
        print(rounds.table(workload, COLUMNS, rows))
    results = [[turn["results"] for turn in contender.turns] for contender in contenders]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("buffers", [1_000, 4_000, 100_000])
def test_replay_through_the_c_entry_points(
    tmp_path: Path, buffers: int, threads: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert that every allocation hits; nanoseconds are printed."""
    if shutil.which(build.compiler()) is None:
        pytest.skip("no C++ compiler")
    program = build.build("replay_bench", tmp_path)
    done = subprocess.run(
        [str(program), str(buffers), str(threads), "5"], check=True, capture_output=True, text=True
    )
    output = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert output["hits"] >= 0.9999 * output["allocations"]
