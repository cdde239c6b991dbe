"""Public programs under the pool: parts of their own test suites, with and without it, side by side.

    python tests/programs/public.py [--rounds N] [--only NAME] [--python PYTHON]

Makes a virtual environment in a temporary folder with this checkout and the programs in it (a C++17 compiler
and a package index are needed; `--python` takes a Python that has everything already), and runs each part
alternately under plain Python and under ``mempool run``. Prints a table of medians and exits with 1 if a test
came out otherwise than under plain Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PLAIN, POOL = "plain", "pool"
#: Beside the programs; SciPy's tests import hypothesis.
TOOLS = ("pytest", "hypothesis")


@dataclass(frozen=True)
class Program:
    """A package and the part of its own tests that is run, as arguments of pytest."""

    package: str
    what: str
    tests: tuple[str, ...]


PROGRAMS = (
    Program(
        "scikit-learn",
        "matrix factorisation, clustering",
        ("--pyargs", "sklearn.decomposition.tests.test_nmf", "sklearn.cluster.tests.test_k_means"),
    ),
    Program(
        "statsmodels",
        "regression, smoothing",
        (
            "--pyargs",
            "statsmodels.regression.tests.test_regression",
            "statsmodels.tsa.tests.test_exponential_smoothing",
        ),
    ),
    Program(
        "scipy",
        "filters, convolutions of all shapes",
        (
            "--pyargs",
            "scipy.ndimage.tests.test_filters",
            "scipy.signal.tests.test_signaltools",
            "-k",
            "test_filters or TestFFTConvolve or TestOAConvolve",
        ),
    ),
)


@dataclass
class Runs:
    """What one way of running gave, a value a round.

    Attributes:
        outcome: of each test by name, from the last round.
        cpu: seconds of user and system time.
        wall: seconds.
        peak: bytes, largest resident set.
        reports: of the pool.
    """

    outcome: dict[str, str] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    same: bool = True


def environment() -> dict[str, str]:
    """One thread for BLAS and OpenMP, and nothing of ours from outside."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MEMPOOL", "PYTHONPATH"))}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def make_environment(folder: Path, packages: list[str]) -> Path:
    """A Python with this checkout and the packages."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, str(ROOT), *TOOLS, *packages], check=True, stdout=sys.stderr)
    return python


def run_once(python: Path, program: Program, way: str, runs: Runs, folder: Path) -> None:
    """Run the tests once and add what was measured."""
    results, report = folder / "results.xml", folder / "report.json"
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", f"--junit-xml={results}")
    pool = (python.with_name("mempool"), "run", "--quiet", "--json", report)
    command = [*((python,) if way == PLAIN else pool), *pytest, *program.tests]
    for old in (results, report):
        old.unlink(missing_ok=True)
    with (folder / "output").open("w+b") as output:
        begin = time.perf_counter()
        child = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=output)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        runs.wall.append(time.perf_counter() - begin)
    runs.cpu.append(usage.ru_utime + usage.ru_stime)
    runs.peak.append(usage.ru_maxrss << 10)
    if not results.exists():
        raise RuntimeError((folder / "output").read_text()[-2000:])
    outcome = outcomes(results)
    runs.same &= runs.outcome in ({}, outcome)
    runs.outcome = outcome
    if report.exists():
        runs.reports.append(json.loads(report.read_text())["pools"]["numpy"])


def outcomes(results: Path) -> dict[str, str]:
    """Test -> "passed", "skipped", "failure" or "error"."""
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        ended = [child.tag for child in case if child.tag in ("skipped", "failure", "error")]
        found[name] = ended[0] if ended else "passed"
    return found


def compare(python: Path, program: Program, rounds: int, folder: Path) -> dict[str, Runs]:
    """Both ways, interleaved; each round begins with the other one."""
    runs = {PLAIN: Runs(), POOL: Runs()}
    for number in range(rounds):
        for way in (PLAIN, POOL)[:: 1 if number % 2 == 0 else -1]:
            run_once(python, program, way, runs[way], folder)
            print(f"{program.package}, round {number + 1}: {way}", file=sys.stderr)
    return runs


def identical(runs: dict[str, Runs]) -> bool:
    """Every test the same in all runs, both ways."""
    return runs[PLAIN].same and runs[POOL].same and runs[PLAIN].outcome == runs[POOL].outcome


def row(program: Program, runs: dict[str, Runs]) -> str:
    """One line of the table."""
    passed = [sum(o == "passed" for o in runs[way].outcome.values()) for way in (PLAIN, POOL)]
    cells = [f"{program.package}: {program.what}", f"{passed[0]:,} / {passed[1]:,}"]
    cells.append("yes" if identical(runs) else "NO")
    for measured, unit in (("cpu", 1.0), ("wall", 1.0), ("peak", float(1 << 20))):
        before, after = (statistics.median(getattr(runs[way], measured)) / unit for way in (PLAIN, POOL))
        cells.append(f"{before:.1f} / {after:.1f} ({after / before:.2f})")
    last = runs[POOL].reports[-1]
    cells.append(f"{last['allocations']:,}")
    return "| " + " | ".join(cells) + " |"


HEAD = """\
| program | passed, plain / pool | all tests alike | CPU s | wall s | peak RSS MiB | allocations |
| --- | ---: | --- | ---: | ---: | ---: | ---: |"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[program.package for program in PROGRAMS])
    parser.add_argument("--python", type=Path)
    options = parser.parse_args()
    chosen = [program for program in PROGRAMS if options.only in (None, program.package)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = [program.package for program in chosen]
        python = options.python or make_environment(folder / "venv", packages)
        lines, alike = [], True
        for program in chosen:
            runs = compare(python.absolute(), program, options.rounds, folder)
            lines.append(row(program, runs))
            alike &= identical(runs)
    print("\n".join([HEAD, *lines]))
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
