"""Errors of the command line: the documented exit code, one line, no partial output; help, completion."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from mempool.cli.app import call
from solvers import SOLVERS
from traces import Buffers, EventType, Trace
from traces.formats.minimalloc import write_csv
from traces.formats.parquet import write_trace
from traces.workload import generate

COMMAND = str(Path(sysconfig.get_path("scripts"), "mempool"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a trace of some iterations and a CSV."""
    monkeypatch.chdir(tmp_path)
    write_trace(generate(60, 1), "t.trace")
    write_csv(Buffers.of([0, 1, 2], [3, 4, 5], [10, 20, 30]), "b.csv")
    return tmp_path


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
@pytest.mark.parametrize("verb", ["plan", "check", "info"])
def test_bad_file_is_a_single_line_with_its_name(
    folder: Path, verb: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, one line with the file's name, nothing on stdout, no file written."""
    Path("bad").write_bytes(BAD[content])
    extra = {"plan": ["-o", "out"], "check": ["b.csv"], "info": []}[verb]
    before = sorted(folder.iterdir())
    assert call([verb, "bad", *extra, "--json"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mempool: bad")
    assert err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("verb", ["plan", "info"])
def test_absurd_alignment_in_a_file_is_an_error_of_the_file(
    folder: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = generate(60, 1)
    write_trace(dataclasses.replace(trace, metadata={"alignment": str(2**62)}), "bad")
    assert call([verb, "bad"]) == 3
    assert "add up to 2**62 bytes" in capsys.readouterr().err


def test_plan_unusable_on_the_host_is_refused_before_the_program_begins(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    iteration = [EventType.ALLOC, EventType.ALLOC, EventType.FREE, EventType.FREE]
    buffer = np.repeat(2 * np.arange(40), 4) + np.tile([0, 1, 0, 1], 40)
    write_trace(Trace.of(kind=iteration * 40, buffer=buffer, size=[1001, 2003, 0, 0] * 40), "odd")
    Path("program.py").write_text("print('began')")
    assert call(["plan", "odd", "-o", "odd.plan"]) == 0
    assert call(["run", "--plan", "odd.plan", "program.py"]) == 3
    assert "mempool plan --alignment 64" in capsys.readouterr().err
    assert call(["plan", "odd", "-o", "whole.plan", "--whole"]) == 0
    assert call(["run", "--plan", "whole.plan", "program.py"]) == 3
    assert "--whole" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["plan", "info"])
def test_file_truncated_anywhere_is_refused(
    folder: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Traces and plans cut at any place give exit code 3."""
    assert call(["plan", "t.trace", "-o", "p.plan"]) == 0
    for name in ("t.trace", "p.plan"):
        content = Path(name).read_bytes()
        for cut in np.linspace(0, len(content) - 1, 12).astype(int):
            Path("cut").write_bytes(content[:cut])
            assert call([verb, "cut"]) == 3
            assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["plan"], 2, "issing argument"),
        (["plan", "t.trace", "--frobnicate"], 2, "--frobnicate"),
        (["plan", "t.trace", "--solver", "magic"], 2, "magic"),
        (["plan", "t.trace", "--capacity", "much"], 2, "much"),
        (["plan", "t.trace", "--target", "low"], 2, "--target: 'low'"),
        (["plan", "t.trace", "--target", "-1%"], 2, "--target: '-1%'"),
        (["plan", "t.trace", "--alignment", "3"], 2, "power of two"),
        (["plan", "t.trace", "--alignment", str(2**63)], 2, "--alignment"),
        (["plan", "t.trace", "--capacity", "9" * 400], 2, "more than any memory has"),
        (["plan", "t.trace", "--capacity", "4K", "--capacity", "0"], 2, "an arena of 0 bytes"),
        (
            ["plan", "t.trace", "--capacity", "4K", "--capacity", "8K", "--solver", "best_fit"],
            2,
            "auto, greedy",
        ),
        (
            ["plan", "t.trace", "--capacity", "4K", "--capacity", "8K", "-o", "p.csv"],
            2,
            "a CSV holds one arena",
        ),
        (["plan", "t.trace", "--wait-bytes", "-1"], 2, "--wait-bytes"),
        (["plan", "t.trace", "--seed", "x"], 2, "--seed"),
        (["plan", "t.trace", "--time-limit", "nan"], 2, "--time-limit"),
        (["plan", "t.trace", "--nodes", "-1"], 2, "--nodes"),
        (["plan", "t.trace", "-o", "t.trace"], 2, "overwrite"),
        (["plan", "t.trace", "-o", "no/folder/p"], 3, "no/folder/p: No such file"),
        (["plan", "t.trace", "-o", "."], 3, "Is a directory"),
        (["plan", "t.trace", "-o", "t.trace/p"], 3, "t.trace/p: Not a directory"),
        (["info", "/proc/self/mem"], 3, "/proc/self/mem"),
        (["plan", "t.trace", "-o", "p.csv"], 2, "--whole"),
        (["plan", "nowhere"], 3, "nowhere"),
        (["plan", "."], 3, "."),
        (["check", "t.trace", "t.trace"], 3, "not a plan"),
        (["check", "b.csv", "b.csv"], 3, "without offsets"),
        (["info", "nowhere"], 3, "nowhere"),
        (["frobnicate"], 2, "frobnicate"),
        (["--frobnicate"], 2, "--frobnicate"),
        (["demo", "--framework", "fortran"], 2, "fortran"),
    ],
)
def test_wrong_command_is_a_single_line(
    folder: Path, command: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage errors and missing files: the documented code, one line with the culprit, no traceback."""
    assert call(command) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_plan_is_no_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan given in place of a trace is a bad file."""
    assert call(["plan", "t.trace", "-o", "p.plan"]) == 0
    assert call(["plan", "p.plan"]) == 3
    assert call(["check", "p.plan", "p.plan"]) == 3


def test_output_to_a_closed_pipe_is_silent(folder: Path) -> None:
    """``mempool info ... | head -1`` prints no error."""
    done = subprocess.run(
        f"{COMMAND} info t.trace | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_package_is_runnable_as_the_command(tmp_path: Path) -> None:
    """``python -m mempool`` works without a script of the name on the path."""
    commands = ([COMMAND], [sys.executable, "-m", "mempool"])
    script, package = (
        subprocess.run([*command, "info", "no.trace"], capture_output=True, text=True, cwd=tmp_path)
        for command in commands
    )
    assert (package.returncode, package.stderr) == (script.returncode, script.stderr)
    assert package.returncode == 3


@pytest.mark.parametrize("verb", ["plan", "check", "info", "run", "demo"])
def test_every_verb_has_help_with_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help succeeds and shows commands to copy."""
    assert call([verb, "--help"]) == 0
    assert f"mempool {verb}" in capsys.readouterr().out.split("For example")[1]


def test_help_names_every_solver(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user need not name a wrong solver to see the list."""
    monkeypatch.setenv("COLUMNS", "400")
    assert call(["plan", "--help"]) == 0
    assert set(SOLVERS) <= set(re.findall(r"\w+", capsys.readouterr().out))


def test_completion_offers_verbs_and_solvers() -> None:
    """The shell completes verbs and the names of solvers."""
    for words, place, offered in (
        ("mempool pl", "1", "plan"),
        ("mempool sh", "1", "show"),
        ("mempool show --allocator best", "3", "best_fit"),
        ("mempool compare --allocator rec", "3", "recorded"),
        ("mempool plan --solver f", "3", "first_fit"),
        ("mempool plan --solver sm", "3", "smartpool"),
    ):
        environment = {"_MEMPOOL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        done = subprocess.run(
            [COMMAND], env=os.environ | environment, capture_output=True, text=True, check=True
        )
        assert offered in done.stdout.split()


def test_help_imports_no_solver_and_no_parquet() -> None:
    """Help needs neither a solver nor Parquet."""
    code = (
        "import sys; from mempool.cli.app import call; call(['--help']);"
        "sys.exit(' '.join({'ortools', 'pyarrow', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
