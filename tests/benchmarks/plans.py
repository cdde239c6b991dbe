"""Arena sizes and solve times, compared with other solvers: tables of docs/benchmarks.md in Markdown.

``python tests/benchmarks/plans.py [--seeds N] [--problems N] [--only PART ...]`` prints them in the
order of `PARTS`; `millions` only if named.

Times are processor seconds of this process, of one thread, so that other work on the machine counts little.
Each row ends with the goal and whether the goal is met. Every plan passes the checker, outside the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import own_process
from instances import GENERATORS, flat, scattered
from published_planners import PUBLISHED

import solvers.packing.solve
from mempool.demo.worker import resident_bytes
from solvers import SOLVERS, Plan, Status, Stop, check, lower_bound, solve
from solvers.packing.plan import DEFAULT_NODES
from traces import workload
from traces.buffers import Buffers

BENCH = Path(__file__).parents[3] / "shared" / "bench" / "minimalloc"
CAPACITY = 1_048_576
#: Limit on the processor seconds of a solver.
PATIENCE = 20.0


@dataclass(frozen=True)
class Run:
    """One call of `solve`; ``reached`` is the time at which the arena was first within the ratio, or None.

    ``resident_bytes`` is the high-water mark of the process before the checker runs.
    """

    plan: Plan
    ratio: float
    seconds: float
    reached: float | None
    resident_bytes: int


def run(buffers: Buffers, within: float = 1.0, limit: float = PATIENCE, **how: Any) -> Run:
    bound, reached, begin = lower_bound(buffers), list[float](), time.process_time()

    def spent() -> float:
        return time.process_time() - begin

    def better(plan: Plan) -> None:
        if plan.arena_bytes <= within * bound:
            reached.append(spent())

    stop = Stop(nodes=how.pop("nodes", DEFAULT_NODES), interrupt=lambda: spent() > limit)
    plan = solve(buffers, stop=stop, threads=1, on_improvement=better, **how)
    seconds, resident = spent(), resident_bytes("VmHWM")
    if plan.offset is None:
        return Run(plan, float("inf"), seconds, None, resident)
    check(plan, buffers)
    return Run(plan, plan.arena_bytes / bound, seconds, min(reached, default=None), resident)


def public() -> Iterator[tuple[str, Buffers]]:
    if not BENCH.is_dir():
        print("The public instances are not beside this repository.", file=sys.stderr)
        return
    for name in "ABCDEF":
        table = np.loadtxt(BENCH / f"{name}.{CAPACITY}.csv", np.int64, delimiter=",", skiprows=1)
        yield name, Buffers.of(table[:, 1], table[:, 2], table[:, 3])


def head(*columns: str) -> None:
    print(f"\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")


def row(*cells: Any) -> None:
    print(f"| {' | '.join(str(cell) for cell in cells)} |", flush=True)


def met(holds: bool) -> str:
    return "met" if holds else "missed"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def by_capacity(seeds: range, _: int) -> None:
    """Print the time until a plan fits the capacity."""
    head("instance", "median s", "worst s", f"fits, of {len(seeds)}", "goal: 0.005 s, worst 0.05 s")
    for name, buffers in public():
        runs = [run(buffers, capacity=CAPACITY, seed=seed, nodes=None) for seed in seeds]
        times = [r.seconds for r in runs]
        median, worst = statistics.median(times), max(times)
        fits = sum(r.plan.offset is not None for r in runs)
        row(name, seconds(median), seconds(worst), fits, met(median <= 0.005 and worst <= 0.05))


def by_load(seeds: range, _: int) -> None:
    """Print the time until the peak load is reached without a capacity."""
    head("instance", "median s", "worst s", f"at the load, of {len(seeds)}", "worst ratio", "goal")
    for name, buffers in public():
        goal = 10.0 if name == "D" else 0.3
        runs = [run(buffers, limit=goal, seed=seed, nodes=None) for seed in seeds]
        times = sorted(float("inf") if r.reached is None else r.reached for r in runs)
        there = sum(r.reached is not None for r in runs)
        median, worst = (t if t < float("inf") else None for t in (statistics.median_high(times), times[-1]))
        ratio = max(r.ratio for r in runs)
        row(
            name,
            seconds(median),
            seconds(worst),
            there,
            f"{ratio:.4f}",
            f"{goal} s: {met(there == len(seeds))}",
        )


LARGE: list[tuple[str, Callable[[], Buffers], float, float | None]] = [
    ("training 10^5", lambda: workload.buffers(10**5, 0), 1.0005, 0.5),
    ("training 10^6", lambda: workload.buffers(10**6, 0), 1.0005, 0.5),
    ("flat 10^5", lambda: flat(10**5, 0), 1.0, None),
    ("flat 10^6", lambda: flat(10**6, 0), 1.0, None),
    ("scattered 10^5", lambda: scattered(10**5, 0), 1.0, None),
    ("scattered 10^6", lambda: scattered(10**6, 0), 1.0, None),
]


def large(_: range, __: int) -> None:
    """Print ratios and times of large training-shaped and random instances with seed 0."""
    head("instance", "ratio", "s to the end", "ratio wanted", "s until then", "goal")
    for name, make, ratio, limit in LARGE:
        r = run(make(), within=ratio)
        if limit is None:
            row(name, f"{r.ratio:.5f}", seconds(r.seconds), "-", "-", "-")
            continue
        good = r.reached is not None and r.reached <= limit
        row(name, f"{r.ratio:.5f}", seconds(r.seconds), ratio, seconds(r.reached), f"{limit} s: {met(good)}")


def millions(_: range, __: int) -> None:
    """Print training-shaped instances with seed 0, each in a separate process.

    *Resident* is the high-water mark of the process from its start to the plan, the creation of the buffers
    included.
    """
    head("buffers", "s until 1.0005", "s to the end", "ratio", "resident GB", "goal")
    for n, limit in ((10**6, 0.5), (2 * 10**6, None), (4 * 10**6, None), (10**7, 8.0)):
        said = own_process.run_separately(__file__, n)
        if "error" in said:
            row(f"{n:,}", said["error"], "-", "-", "-", "-")
            continue
        reached, gigabytes = said["reached"], said["resident_bytes"] / 1e9
        good = limit is not None and reached is not None and reached <= limit and gigabytes < 4
        goal = "-" if limit is None else f"{limit} s, 4 GB: {met(good)}"
        times = seconds(reached), seconds(said["seconds"])
        row(f"{n:,}", *times, f"{said['ratio']:.5f}", f"{gigabytes:.1f}", goal)


def one_of_millions(n: int) -> dict[str, float | None]:
    """Solve one instance in this process."""
    r = run(workload.buffers(n, 0), within=1.0005)
    return {name: getattr(r, name) for name in ("reached", "seconds", "ratio", "resident_bytes")}


def everyday(seeds: range, _: int) -> None:
    """Print training-shaped instances of everyday size."""
    head("buffers", "median s", "worst s", "worst ratio", "goal: 1.001, 0.02 s")
    for n in (1000, 2000):
        runs = [run(workload.buffers(n, seed)) for seed in seeds]
        times, ratio = [r.seconds for r in runs], max(r.ratio for r in runs)
        good = ratio <= 1.001 and max(times) <= 0.02
        row(n, seconds(statistics.median(times)), seconds(max(times)), f"{ratio:.5f}", met(good))


def problem(name: str, seed: int) -> Buffers:
    """Return a problem of 2 to 30 buffers."""
    return GENERATORS[name](int(np.random.default_rng([seed, 7]).integers(2, 31)), seed)


def proofs(_: range, problems: int) -> None:
    """Print proofs for two to thirty buffers of each problem class, each within 10 s."""
    head("kind", "proven in 0.1 s", "proven in 10 s", "worst s", "goal: 99 %, all")
    for name in GENERATORS:
        runs = [run(problem(name, seed), limit=10.0, nodes=None) for seed in range(problems)]
        proven = [r.seconds for r in runs if r.plan.status is Status.OPTIMAL]
        soon = sum(t <= 0.1 for t in proven) / problems
        worst = max(r.seconds for r in runs)
        good = met(soon >= 0.99 and len(proven) == problems)
        row(name, f"{soon:.1%}", f"{len(proven)} of {problems}", seconds(worst), good)


def instances() -> Iterator[tuple[str, Buffers]]:
    yield from public()
    yield "training 1,000", workload.buffers(1000, 0)
    yield "training 2,000", workload.buffers(2000, 0)
    yield from ((name, make()) for name, make, _, _ in LARGE)


def others(_: range, __: int) -> None:
    """Print ratio and processor seconds of each solver with seed 0 and the default budget."""
    solvers.packing.solve.SOLVERS = SOLVERS | PUBLISHED
    names = ["auto", *PUBLISHED]
    head("instance", *(f"`{name}`" for name in names))
    for name, buffers in instances():
        runs = [run(buffers, solver=solver) for solver in names]
        row(name, *(cell(r) for r in runs))


def cell(r: Run) -> str:
    return f"> {PATIENCE:.0f} s" if r.plan.offset is None else f"{r.ratio:.4f}, {seconds(r.seconds)} s"


PARTS: dict[str, Callable[[range, int], None]] = {
    "capacity": by_capacity,
    "load": by_load,
    "large": large,
    "millions": millions,
    "everyday": everyday,
    "proofs": proofs,
    "others": others,
}
#: Parts that need less than a gigabyte.
USUAL = [name for name in PARTS if name != "millions"]


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--problems", type=int, default=1000, help="number of each problem class, to prove")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=USUAL, help="all but millions")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.one:
        print(json.dumps(one_of_millions(*json.loads(options.one))))
        return
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for part in options.only:
        PARTS[part](seeds, options.problems)


if __name__ == "__main__":
    main()
