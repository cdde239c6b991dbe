"""Command lines that are refused, bad files, help and completion: exit code, one line, no partial output."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import Cli
from commands import COMMAND
from hypothesis import given
from hypothesis import strategies as st
from recordings import random_trace
from shown import four_buffers
from swap_steps import training

from mempool.cli.app import call
from mempool.cli.run import exec as launch
from mempool.units import parse_memory, typed_size
from traces import Buffers, EventType, Trace
from traces.formats.minimalloc import write_csv
from traces.formats.parquet import write_trace
from traces.workload import generate


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each type."""
    folder = tmp_path_factory.mktemp("inputs")
    write_trace(generate(60, 1), folder / "t.trace")
    write_trace(four_buffers(), folder / "four.trace")
    write_trace(training(), folder / "swap.trace")
    write_trace(training(accesses=False), folder / "silent.trace")
    write_trace(random_trace(0, 300), folder / "random.trace")
    write_csv(Buffers.of([0, 1, 2], [3, 4, 5], [10, 20, 30]), folder / "b.csv")
    for name, *options in (("t.plan",), ("whole.plan", "--whole")):
        assert call(["plan", str(folder / "t.trace"), "-o", str(folder / name), *options]) == 0
    return folder


@pytest.fixture
def folder(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a copy of the inputs."""
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("t.trace")
    Path("loop").symlink_to("loop")
    Path("hidden").mkdir()
    Path("app").mkdir()
    for name in ("script.py", "hidden/script.py", "hidden/traces.py", "app/__main__.py"):
        Path(name).touch()
    return tmp_path


#: Command line, exit code, part of the line on stderr.
REFUSED: list[Any] = [
    ("frobnicate", 2, "frobnicate"),
    ("demo --framework fortran", 2, "fortran"),
    ("plan", 2, "issing argument"),
    ("plan t.trace --solver magic", 2, "no solver 'magic'"),
    ("plan t.trace --capacity much", 2, "much"),
    ("plan t.trace --capacity " + "9" * 400, 2, "more than any memory has"),
    ("plan t.trace --target low", 2, "--target: 'low'"),
    ("plan t.trace --alignment 3", 2, "power of two"),
    (f"plan t.trace --alignment {2**63}", 2, "--alignment"),
    ("plan t.trace --time-limit nan", 2, "--time-limit"),
    ("plan t.trace -o t.trace", 2, "overwrite"),
    ("plan t.trace -o no/folder/p", 3, "no/folder/p: No such file"),
    ("plan t.trace -o .", 3, "Is a directory"),
    ("plan t.trace -o p.csv", 2, "--whole"),
    ("plan nowhere", 3, "nowhere"),
    ("plan .", 3, "."),
    ("plan t.plan", 3, "a plan already"),
    ("check t.trace t.trace", 3, "not a plan"),
    ("check t.plan t.plan", 3, "a plan, not a trace"),
    ("info /proc/self/mem", 3, "/proc/self/mem"),
    ("info t.plan --device 0", 2, "a plan, which has no devices"),
    ("convert t.plan c.trace", 3, "t.plan: a plan, which has no events"),
    ("convert t.trace t.trace", 2, "would be overwritten"),
    ("convert t.trace link", 2, "would be overwritten"),
    *((f"convert t.trace x{suffix}", 2, ".csv, and .trace or .parquet")
      for suffix in (".json", ".trace.gz", ".PICKLE", ".perfetto", ".plan")),
    ("compare random.trace -a nobody", 2, "no allocator 'nobody'"),
    ("compare random.trace -a recorded", 2, "does not tell what its allocator reserved"),
    ("compare 'none*.trace'", 3, "none*.trace: no file matches"),
    ("compare random.trace --limit 24", 2, "'24' has no unit: say 24GiB"),
    ("fit transformers:gpt2", 4, "fit needs PyTorch, which is not installed: pip install 'mempool[torch]'"),
    ("fit 'no model'", 2, "names no model"),
    ("fit transformers:m --seq x", 2, "--seq: 'x' is no number"),
    ("fit transformers:m --limit 0", 2, "--limit: nothing fits"),
    ("fit transformers:m --limit 24", 2, "'24' has no unit: say 24GiB"),
    ("fit transformers:m --card 'RTX 4091'", 2, "did you mean RTX 4090"),
    ("fit transformers:m --mode trian", 2, "--mode: no 'trian'"),
    ("fit transformers:m --device tpu", 2, "--device: no 'tpu'"),
    ("fit transformers:m --dtype fp7", 2, "--dtype: no type 'fp7'"),
    ("fit transformers:m --trace x.trace --batch 1,2", 2, "--trace is of one size"),
    ("fit transformers:m --trace .", 3, "Is a directory"),
    ("fit transformers:m --main", 2, "--main and arguments are for a script.py that runs as a program"),
    ("run ''", 3, "No such file"),
    ("run nowhere.py", 3, "nowhere.py"),
    ("run loop", 3, "loop: No such file"),
    ("run hidden/script.py", 2, "traces"),
    ("run --frobnicate script.py", 2, "--frobnicate"),
    ("run --limit 24 script.py", 2, "'24' has no unit: say 24GiB"),
    ("run --max-reserved 1048575 script.py", 2, "'1048575' has no unit: say 1048575MiB"),
    ("run --plan script.py script.py", 3, "script.py"),
    ("run --record no/folder/t script.py", 3, "no/folder/t"),
    ("run --record loop script.py", 3, "loop: Too many levels"),
    (f"run --record {'n' * 300} script.py", 3, "File name too long"),
    ("run --record script.py script.py", 2, "script.py would be written over"),
    ("run --record same --json same script.py", 2, "same would be written over"),
    ("run --plan t.plan --record t.plan script.py", 2, "t.plan would be written over"),
    ("MEMPOOL_RECORD=script.py run script.py", 2, "script.py would be written over"),
    ("MEMPOOL_RECORD=hidden run script.py", 3, "hidden: Is a directory"),
    ("MEMPOOL_PLAN=nowhere run script.py", 3, "nowhere: No such file"),
    ("show absent.trace --perfetto x.json", 3, "absent.trace: No such file"),
    ("show four.trace t.plan --perfetto x.json", 3, "t.plan: a plan for another trace"),
    ("show four.trace t.trace --perfetto x.json", 3, "t.trace: a trace without offsets, not a plan"),
    ("show four.trace -o four.trace", 2, "would take the place of another file"),
    ("show four.trace -o no/such/folder.html", 3, "No such file or directory"),
    ("show t.plan -a first_fit --perfetto x.json", 2, "allocators are simulated on traces"),
    ("show four.trace -a worst_fit --perfetto x.json", 2, "no allocator 'worst_fit'; there are"),
    ("show four.trace -a first_fit:colour=red --perfetto x.json", 2, "first_fit has no setting colour"),
    ("swap swap.trace --limit 24", 2, "'24' has no unit: say 24GiB"),
    ("swap swap.trace --host 24", 2, "'24' has no unit: say 24GiB"),
    ("swap swap.trace --bandwidth 24", 2, "'24' has no unit: say 24GiB"),
    ("swap swap.trace --limit 1.5", 2, "'1.5' is no whole number of bytes: say 12GiB, `free`"),
    ("swap swap.trace --link 1e300,1", 2, "a link begins within"),
    ("swap swap.trace --link rope", 2, "--link"),
    ("swap swap.trace -o swap.trace", 2, "overwrite"),
    ("swap silent.trace", 3, "no reads and writes"),
    ("swap b.csv", 3, "b.csv: a csv, which has no events"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "code", "reason"), REFUSED)
def test_refused_command_prints_a_single_line_and_writes_and_runs_nothing(
    folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, code: int, reason: str
) -> None:
    """The documented exit code, one line with the culprit, no traceback, no file, no import of PyTorch."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    monkeypatch.setattr(launch, "start", lambda *_, **__: pytest.fail("the program began"))
    while command.startswith("MEMPOOL"):
        variable, command = command.split(" ", 1)
        monkeypatch.setenv(*variable.split("=", 1))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert reason in cli.error(command, code=code)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("12 GB", 12 * 10**9),
        ("24B", 24),
        ("0", 0),
        ("1048576", 1 << 20),
        ("8e9", 8 * 10**9),
        (" 24 gib ", 24 << 30),
    ],
)
def test_sizes_with_a_unit_and_plausible_numbers_of_bytes_are_taken(text: str, size: int) -> None:
    assert parse_memory(text) == size


BAD = {
    "nothing": b"",
    "text": b"hello\nworld\n",
    "zeros": bytes(4096),
    "parquet_stub": b"PAR1PAR1",
    "no_size": b"id,lower,upper\n1,2,3\n",
    "end_before_start": b"id,lower,upper,size\na,5,2,10\n",
    "negative": b"id,lower,upper,size\na,0,2,-10\n",
    "huge": b"id,lower,upper,size\na,0,2,99999999999999999999\n",
    "sum": b"id,lower,upper,size\na,0,2,4611686018427387904\nb,0,2,4611686018427387904\n",
    "end": b"id,lower,upper,size,offset\na,0,2,4611686018427387904,4611686018427387904\n",
    "twice": b"id,lower,upper,size\na,0,2,1\na,0,2,1\n",
    "short_row": b"id,lower,upper,size\na,0,2\n",
}


@pytest.mark.parametrize("content", BAD)
@pytest.mark.parametrize("verb", ["plan bad -o out", "check bad b.csv", "info bad"])
def test_bad_file_is_named_in_a_single_line(folder: Path, verb: str, content: str, cli: Cli) -> None:
    Path("bad").write_bytes(BAD[content])
    assert cli.error(*verb.split(), "--json", code=3).startswith("mempool: bad")
    assert not Path("out").exists()


@pytest.mark.parametrize("verb", ["plan", "info"])
def test_truncated_or_absurd_file_is_refused(folder: Path, verb: str, cli: Cli) -> None:
    """Traces and plans cut at any place, and an alignment beyond any memory."""
    for name in ("t.trace", "t.plan"):
        content = Path(name).read_bytes()
        for cut in np.linspace(0, len(content) - 1, 12).astype(int):
            Path("cut").write_bytes(content[:cut])
            cli.error(verb, "cut", code=3)
    write_trace(dataclasses.replace(generate(60, 1), metadata={"alignment": str(2**62)}), "bad")
    assert "add up to 2**62 bytes" in cli.error(verb, "bad", code=3)


def test_plan_unusable_on_the_host_is_refused_before_the_program_begins(folder: Path, cli: Cli) -> None:
    iteration = [EventType.ALLOC, EventType.ALLOC, EventType.FREE, EventType.FREE]
    buffer = np.repeat(2 * np.arange(40), 4) + np.tile([0, 1, 0, 1], 40)
    write_trace(Trace.of(kind=iteration * 40, buffer=buffer, size=[1001, 2003, 0, 0] * 40), "odd")
    Path("program.py").write_text("print('began')")
    for options, remedy in (([], "mempool plan --alignment 64"), (["--whole"], "--whole")):
        cli.printed("plan odd -o odd.plan", *options)
        assert remedy in cli.error("run --plan odd.plan program.py", code=3)


def test_output_to_a_closed_pipe_is_silent(folder: Path) -> None:
    """``mempool info ... | head -1`` prints no error."""
    command = f"{COMMAND} info t.trace | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode in (0, 141)) == ("", True)


def test_package_is_runnable_as_the_command(tmp_path: Path) -> None:
    """``python -m mempool`` works without a script of the name on the path."""
    commands = ([COMMAND], [sys.executable, "-m", "mempool"])
    script, package = (
        subprocess.run([*command, "info", "no.trace"], capture_output=True, text=True, cwd=tmp_path)
        for command in commands
    )
    assert (package.returncode, package.stderr) == (script.returncode, script.stderr)
    assert package.returncode == 3


def test_completion_offers_verbs_allocators_and_solvers() -> None:
    for words, place, offered in (
        ("mempool pl", "1", "plan"),
        ("mempool show --allocator best", "3", "best_fit"),
        ("mempool compare --allocator rec", "3", "recorded"),
        ("mempool plan --solver gr", "3", "greedy"),
    ):
        environment = {"_MEMPOOL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        done = subprocess.run(
            [COMMAND], env=os.environ | environment, capture_output=True, text=True, check=True
        )
        assert offered in done.stdout.split()


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("from mempool.cli.app import call; call(['--help'])", {"ortools", "pyarrow", "pandas"}),
        ("import mempool.show, mempool.cli.show", {"bokeh"}),
    ],
)
def test_heavy_packages_are_imported_only_for_their_work(code: str, heavy: set[str]) -> None:
    code = f"import sys; {code}; sys.exit(' '.join({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@given(st.integers(1, 999 << 40))
def test_typed_size_is_the_next_larger_size_of_three_digits(size: int) -> None:
    typed = parse_memory(typed_size(size), 0)
    assert size <= typed < size * 1.011 + 11
