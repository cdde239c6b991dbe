"""Outcomes of PyTorch's own tests under the pool, compared with those in plain Python.

    python tests/benchmarks/pytorch_suite.py pytorch/test/test_autograd.py [-k WORDS] [--part 1/10]
    python tests/benchmarks/pytorch_suite.py pytorch/test/test_cuda.py --standin

Take the test file from PyTorch's repository, at the release that is installed, and install expecttest. On the
CPU each test runs in plain Python, under the pool, and within a limit of 1 KiB (``--options``). With a CUDA
build, ``--standin`` runs the tests on the stand-in for CUDA, in plain Python and with the guest. Each way is
``mempool run ... -m pytest`` in one process, which is started again after a crash and after a test that takes
too long. A test differs if it passes in plain Python and does something else under the pool, or takes more
than 10 s and 20 times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

#: File with the names of the tests to run, and the file that gets a line when a test begins and ends.
NAMES, JOURNAL = "SUITE_NAMES", "SUITE_JOURNAL"
#: Set: a training precedes the tests, so that the pool has a plan.
TRAINS = "SUITE_TRAINS"
SLOW_SECONDS, SLOW_FACTOR = 10.0, 20.0
#: Options of `mempool run`, in addition to plain Python.
CPU_WAYS, STANDIN_WAYS = ("", "--limit 1KiB"), ("--backend guest",)


# --- in the process of the tests


class Journal:
    """Plugin of pytest that runs the named tests and writes their outcomes as they come."""

    def __init__(self, names: list[str], file: TextIO) -> None:
        self._names, self._file = {name: at for at, name in enumerate(names)}, file

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if name_of(item) in self._names or not self._names]
        for item in items:
            if not self._names:
                self._write("collected", name_of(item))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("begin", nodeid.partition("::")[2])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = "" if report.outcome == "passed" else report.longreprtext[-1500:]
            self._write("end", report.nodeid.partition("::")[2], report.outcome, report.duration, why)

    def _write(self, *entry: Any) -> None:
        print(json.dumps(entry), file=self._file, flush=True)


def pytest_sessionstart() -> None:
    """Train until the pool has a plan, if that is asked for."""
    if TRAINS not in os.environ:
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        model(torch.ones(4096, 512, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)  # the pool plans in a thread of its own


def name_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def pytest_configure(config: pytest.Config) -> None:
    names = json.loads(Path(os.environ[NAMES]).read_text(encoding="utf-8"))
    journal = Path(os.environ[JOURNAL]).open("a", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    config.pluginmanager.register(Journal(names, journal))


# --- in the process that compares


class Suite:
    """A test file and the environment of its processes.

    Args:
        file: a file of PyTorch's tests.
        words: expression that selects tests, as pytest's ``-k``.
        seconds: time after which a test counts as too long.
        folder: folder for the files of this comparison.
        environment: variables for the tests.
    """

    def __init__(
        self, file: Path, words: str, seconds: float, folder: Path, environment: dict[str, str]
    ) -> None:
        self._file, self._words, self._seconds = file.resolve(), words, seconds
        self._names, self._journal, self._log = folder / "names", folder / "journal", folder / "log"
        paths = [environment.get("PYTHONPATH"), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
        self._environment = os.environ | environment
        self._environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTORCH_TEST_WITH_SLOW": "0",
            NAMES: str(self._names),
            JOURNAL: str(self._journal),
        }

    def names(self) -> list[str]:
        """Return the names of the tests of the file."""
        process = self._start(None, [], "--collect-only")
        if process.wait() != 0:
            raise SystemExit(self._log.read_text(encoding="utf-8", errors="replace")[-3000:])
        return [entry[1] for entry in self._entries()]

    def outcomes(
        self, options: str | None, names: list[str], plain: dict[str, tuple[str, float, str]] | None = None
    ) -> dict[str, tuple[str, float, str]]:
        """Return outcome, seconds and message of each test; failed tests run again in another process.

        Args:
            options: options of `mempool run`; None: plain Python.
            names: the tests.
            plain: outcomes in plain Python, if they are known.
        """
        outcomes = self._run(options, names, plain or {})
        failed = [name for name, (outcome, *_) in outcomes.items() if outcome == "failed"]
        return outcomes | self._run(options, failed, plain or {})  # an earlier test may have disturbed them

    def _run(
        self, options: str | None, names: list[str], plain: dict[str, tuple[str, float, str]]
    ) -> dict[str, tuple[str, float, str]]:
        outcomes: dict[str, tuple[str, float, str]] = {}
        while left := [name for name in names if name not in outcomes]:
            process = self._start(options, left)
            verdict = self._watch(process, plain)
            entries = list(self._entries())
            outcomes |= {name: (*said,) for kind, name, *said in entries if kind == "end"}
            begun = [name for kind, name, *_ in entries if kind == "begin" and name not in outcomes]
            if begun:
                outcomes[begun[-1]] = (verdict, self._seconds, "")
            elif not entries:
                raise SystemExit(self._log.read_text(encoding="utf-8", errors="replace")[-3000:])
            else:
                outcomes |= {name: ("not run", 0.0, "") for name in left if name not in outcomes}
        return outcomes

    def _start(self, options: str | None, names: list[str], *more: str) -> subprocess.Popen[bytes]:
        self._names.write_text(json.dumps(names), encoding="utf-8")
        self._journal.write_text("")
        command = [sys.executable]
        if options is not None:
            command = [str(Path(sys.executable).with_name("mempool")), "run", "--quiet", "--fresh"]
            command += options.split()
        command += ["-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider", "--noconftest"]
        command += ["-c", os.devnull, "--rootdir", str(self._file.parent), "-q", "-W", "ignore"]
        command += ["-k", self._words, *more, str(self._file)]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command, cwd=self._file.parent, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def _watch(self, process: subprocess.Popen[bytes], plain: dict[str, tuple[str, float, str]]) -> str:
        """Wait for the end of a process, and end the process if a test takes too long."""
        size, since, allowed = 0, time.monotonic(), self._seconds + 120  # to collect the tests
        while process.poll() is None:
            time.sleep(0.2)
            if (now := self._journal.stat().st_size) != size:
                size, since = now, time.monotonic()
                *_, (_, name, *_) = self._entries()
                allowed = max(self._seconds, SLOW_FACTOR * plain.get(name, ("", 0.0))[1])
            elif time.monotonic() - since > allowed:
                process.kill()
                process.wait()
                return "too long"
        return f"crash {process.returncode}"

    def _entries(self) -> Iterator[list[Any]]:
        for line in self._journal.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # else a process is writing it, or was killed meanwhile
                yield json.loads(line)


def differing(
    plain: dict[str, tuple[str, float, str]], other: dict[str, tuple[str, float, str]]
) -> dict[str, str]:
    """Return what became of each test that passes in plain Python and differs under the pool."""
    found = {}
    for name, (outcome, seconds, _) in plain.items():
        became, took, why = other.get(name, (outcome, seconds, ""))
        if outcome == "passed" != became:
            found[name] = f"{became}\n{why}"
        elif outcome == "passed" and took > max(SLOW_SECONDS, SLOW_FACTOR * seconds):
            found[name] = f"{took:.1f} s instead of {seconds:.1f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-k", dest="words", default="", help="select tests, as pytest's -k does")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="run every Nth test, from the Kth on")
    parser.add_argument("--train", action="store_true", help="train first, so that the pool has a plan")
    parser.add_argument("--standin", action="store_true", help="on the stand-in for CUDA")
    parser.add_argument("--values", choices=("copied", "zero"), default="copied", help="of the stand-in")
    parser.add_argument("--options", action="append", metavar="OPTIONS", help="of `mempool run`, for a way")
    parser.add_argument("--seconds", type=float, default=60, help="a test may take that long; default: 60")
    parser.add_argument("--json", type=Path, help="write all outcomes")
    chosen = parser.parse_args()
    environment = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if chosen.standin:
            from mempool.hardware.gpu_memory import card
            from mempool.rehearsal import Machine, standin

            installation = standin.find_installation()
            standin.write_libraries(folder, installation)
            settings = Machine(card("H100"), values=chosen.values).settings(installation)
            environment = {
                standin.FOLDER: str(folder),
                standin.SETTINGS: settings + ",arguments=/dev/null",
                "PYTHONPATH": str(Path(standin.__file__).with_name("startup")),
            }
        if chosen.train:
            environment[TRAINS] = "1"
        suite = Suite(chosen.file, chosen.words, chosen.seconds, folder, environment)
        part, parts = map(int, chosen.part.split("/"))
        names = suite.names()[part - 1 :: parts]
        ways = chosen.options or (STANDIN_WAYS if chosen.standin else CPU_WAYS)
        plain = suite.outcomes(None, names)
        print(f"plain: {counts(plain)}", flush=True)
        short = [name for name in names if plain[name][0] != "too long"]
        outcomes = {"plain": plain}
        for options in ways:
            way = outcomes[f"run {options}"] = suite.outcomes(options, short, plain)
            # Tests that failed with these may have disturbed them: a test that took too long in plain Python
            # ended its process, and what the tests before it left.
            way |= suite.outcomes(options, list(differing(plain, way)), plain)
            found = differing(plain, way)
            print(f"mempool run {options}: {counts(way)}; {len(found)} differ", flush=True)
            for name, why in found.items():
                print(f"  {name}: {why}")
            if chosen.json is not None:
                chosen.json.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")


def counts(outcomes: dict[str, tuple[str, float, str]]) -> str:
    kinds = [outcome for outcome, *_ in outcomes.values()]
    total = sum(seconds for _, seconds, _ in outcomes.values())
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds))) + f" in {total:.0f} s"


if __name__ == "__main__":
    main()
