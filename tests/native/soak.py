"""Run random worlds around the core for a given time; print and shrink a failing seed.

python tests/native/soak.py --minutes 30
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import build

MODES = ("whole", "inside")  # threads stop between calls, or inside calls
STEPS = 3000
WORLDS = 200  # number per process


class WorldError(Exception):
    """A world failed."""


def worlds(
    program: Path, first: int, count: int, mode: str, *, steps: int = STEPS, **env: str
) -> dict[str, Any]:
    """Run worlds of the given seeds; return the sum of their counters.

    Raises:
        WorldError: a world fails; the error has the seed and the broken rule.
    """
    command = [str(program), "run", str(first), str(count), str(steps), mode]
    variables = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", **env}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=variables, errors="replace"
    )
    if done.returncode != 0:
        *_, said = done.stderr.replace("\r", "\n").strip().split("\nseed ")
        seed, _, text = said.removeprefix("seed ").partition("FAILED")
        raise WorldError(f"seed {seed.strip()} {mode}: FAILED{text or f' with {done.returncode}'}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def minimal_failure(program: Path, seed: int, mode: str, *, steps: int = STEPS, **env: str) -> str:
    """Return the log of a minimal set of steps of a failing seed."""
    command = [str(program), "shrink", str(seed), str(steps), mode]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, **env}, errors="replace"
    ).stdout


def soak(program: Path, seconds: float, first: int, jobs: int) -> dict[str, dict[str, float]]:
    """Run worlds for a given time; return the counters by mode."""
    until = time.monotonic() + seconds
    chunks = ((first + WORLDS * k, mode) for k in itertools.count() for mode in MODES)
    sums: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[dict[str, Any]], str] = {}
        while running or time.monotonic() < until:
            while len(running) < jobs and time.monotonic() < until:
                seed, mode = next(chunks)
                running[pool.submit(worlds, program, seed, WORLDS, mode)] = mode
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                of_mode = sums[running.pop(done)]
                for key, value in done.result().items():
                    of_mode[key] = of_mode.get(key, 0) + value
            total = sum(int(one.get("worlds", 0)) for one in sums.values())
            print(
                f"\r{total:,} worlds, {max(until - time.monotonic(), 0):.0f} s left ", end="", file=sys.stderr
            )
    print(file=sys.stderr)
    return sums


def main() -> int:
    """Return 1 and print the failure if a world fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() // 1_000_000, help="the first; default: the clock"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sanitizer", choices=list(build.SANITIZERS), default="none")
    asked = parser.parse_args()
    objects = build.HERE.parents[1] / "build" / "native"
    program = build.build("world", objects, sanitizer=asked.sanitizer, soon=False)
    try:
        sums = soak(program, 60 * asked.minutes, asked.seed, asked.jobs)
    except WorldError as error:
        print(error)
        seed, mode = str(error).split(":")[0].split()[1:3]
        print(minimal_failure(program, int(seed), mode))
        return 1
    for mode, did in sums.items():
        if did:
            done = ", ".join(f"{did[key]:,.0f} {key}" for key in ("worlds", "steps", "events"))
            rates = (f"{did[key] / did['seconds']:,.0f} {key}" for key in ("worlds", "events"))
            print(f"{mode}: no failure; {done}; {' and '.join(rates)} a second on a core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
