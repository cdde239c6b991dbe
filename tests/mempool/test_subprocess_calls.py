"""Calls in a process of their own: the same results as a call here, without the memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import programs
import pytest
from pools import run, simulated

from mempool import Pool
from mempool.planning.plan_files import call_in_subprocess, read_plans
from solvers import PlanError
from traces import TraceError
from traces.formats.registry import sniff

ABSENT = "a module that is not there"


def test_call_runs_in_another_process_unless_the_module_is_loaded() -> None:
    assert call_in_subprocess(ABSENT, os.getpid) != os.getpid()
    assert call_in_subprocess("os", os.getpid) == os.getpid()


def test_printed_output_of_the_call_is_discarded(capfd: pytest.CaptureFixture[str]) -> None:
    assert call_in_subprocess(ABSENT, print, "noise", flush=True) is None
    assert call_in_subprocess(ABSENT, os.write, 1, b"noise") == 5
    assert capfd.readouterr().out == ""


def test_errors_of_the_call_are_raised(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(TraceError, match="the file is empty") as caught:
        call_in_subprocess(ABSENT, sniff, tmp_path / "empty")
    assert caught.value.file == str(tmp_path / "empty")
    with pytest.raises(FileNotFoundError) as missing:
        call_in_subprocess(ABSENT, read_plans, str(tmp_path / "none"))
    assert missing.value.filename == str(tmp_path / "none")


@pytest.mark.parametrize("program", ["", "/nonexistent/python", "/bin/true"])
def test_call_runs_here_where_no_process_can_start(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program)
    assert call_in_subprocess(ABSENT, os.getpid) == os.getpid()
    with pytest.raises(PlanError):
        call_in_subprocess(ABSENT, _refuse)


def _refuse() -> None:
    raise PlanError("no")


def test_program_with_plan_files_loads_no_arrow(tmp_path: Path) -> None:
    with Pool(simulated(), background=False) as pool:
        run(pool, programs.training(programs.Watched(pool)), 12, marks=True)
        pool.save(tmp_path / "a.plan")
    script = textwrap.dedent("""
        import sys
        from mempool import Pool
        pool = Pool(plan="a.plan", background=False)
        pool.save("b.plan")
        pool.close()
        assert "pyarrow" not in sys.modules
    """)
    subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, check=True)
    first, second = (read_plans(tmp_path / name).plans[0] for name in ("a.plan", "b.plan"))
    assert second.same_sequence(first.pattern)
    assert (second.plan.offset == first.plan.offset).all()
    assert second.made_with == first.made_with


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="this system has no /dev/stdout")
def test_file_descriptors_of_this_process_are_written_here(tmp_path: Path) -> None:
    """A name such as /dev/stdout means another file in another process."""
    script = textwrap.dedent("""
        from mempool import Pool
        with Pool(background=False) as pool:
            for _ in range(12):
                pool.step()
                pool.free(pool.allocate(100_000))
                pool.plan_now()
            pool.save("/dev/stdout")
    """)
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-P", "-c", script], stdout=out, check=True)
    assert len(read_plans(tmp_path / "out").plans[0].buffers) == 1
