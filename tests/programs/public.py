"""Public programs with and without the pool, side by side: parts of their own test suites, and an example.

    python tests/programs/public.py [--rounds N] [--only NAME] [--python PYTHON]

Makes a virtual environment in a temporary folder with this checkout and the programs in it (a C++17 compiler
and a package index are needed; `--python` takes a Python that has everything already), and runs each part
alternately under plain Python and under ``mempool run``. Prints a table of medians and exits with 1 if a test
came out otherwise than under plain Python, or if the example's numbers differ in a bit.
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
    """A package, the part of its own tests that is run, as arguments of pytest, and an example.

    The example is code that leaves its results in ``results``, a list of arrays.
    """

    package: str
    what: str
    tests: tuple[str, ...]
    example: str


#: What the examples' results have in common with each other between runs: every bit.
DIGEST = """
import hashlib, numpy
for result in results:
    print(hashlib.sha256(numpy.ascontiguousarray(result)).hexdigest())
"""

PROGRAMS = (
    Program(
        "scikit-learn",
        "matrix factorisation, clustering",
        ("--pyargs", "sklearn.decomposition.tests.test_nmf", "sklearn.cluster.tests.test_k_means"),
        """
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.decomposition import NMF, PCA
from sklearn.linear_model import LogisticRegression
digits, labels = load_digits(return_X_y=True)
parts = NMF(16, init="nndsvda", max_iter=300, random_state=0)
results = [parts.fit_transform(digits), parts.components_, PCA(10, random_state=0).fit_transform(digits)]
results.append(KMeans(10, n_init=4, random_state=0).fit(digits).cluster_centers_)
results.append(LogisticRegression(max_iter=200).fit(digits / 16, labels).coef_)
""",
    ),
    Program(
        "statsmodels",
        "regression, smoothing",
        (
            "--pyargs",
            "statsmodels.regression.tests.test_regression",
            "statsmodels.tsa.tests.test_exponential_smoothing",
        ),
        """
import warnings
import statsmodels.api as sm
from statsmodels.tsa.api import SARIMAX, ExponentialSmoothing
warnings.simplefilter("ignore")
co2 = sm.datasets.co2.load_pandas().data["co2"].resample("MS").mean().ffill()[:300]
longley = sm.datasets.longley.load_pandas()
results = [sm.OLS(longley.endog, sm.add_constant(longley.exog)).fit().params.to_numpy()]
results.append(ExponentialSmoothing(co2, trend="add", seasonal="add").fit().fittedvalues.to_numpy())
arima = SARIMAX(co2, order=(1, 1, 1), seasonal_order=(0, 1, 1, 12)).fit(disp=0, maxiter=10)
results.append(arima.params.to_numpy())
""",
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
        """
import numpy
from scipy import fft, linalg, ndimage, signal
random, results = numpy.random.default_rng(0), []
for side in (63, 200, 641):
    image = random.normal(size=(side, 2 * side))
    blurred = ndimage.gaussian_filter(image, 3)
    results += [blurred, ndimage.median_filter(image, 5), fft.dctn(image)]
    results += [signal.fftconvolve(image, blurred[:20, :20]), linalg.svdvals(blurred)]
""",
    ),
)


@dataclass
class Runs:
    """Outcomes by test, seconds, bytes and digests of one way of running, a value a round."""

    outcome: dict[str, str] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    same: bool = True
    digests: set[str] = field(default_factory=set)


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
    runs.digests.add(run_example(python, program, way, folder))
    command = [*command_of(python, way, "--json", report), *pytest, *program.tests]
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


def command_of(python: Path, way: str, *options: str | Path) -> list[str | Path]:
    """What the arguments of Python follow."""
    return [python] if way == PLAIN else [python.with_name("mempool"), "run", "--quiet", *options]


def run_example(python: Path, program: Program, way: str, folder: Path) -> str:
    """What the example printed: a digest of each result."""
    command = [*command_of(python, way), "-c", program.example + DIGEST]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, check=True, text=True)
    return done.stdout


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
    """Every test the same in all runs, both ways, and every bit of the example's results."""
    tests = runs[PLAIN].same and runs[POOL].same and runs[PLAIN].outcome == runs[POOL].outcome
    return tests and len(runs[PLAIN].digests | runs[POOL].digests) == 1


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
| program | passed, plain / pool | all alike | CPU s | wall s | peak RSS MiB | allocations |
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
