"""Memory that the pool holds under a limit, on small models on the CPU.

    python tests/benchmarks/swapping_limit.py [--only MODEL ...] [--shares 0.9 0.6] [--steps 40] [--json FILE]

Each run is a separate process. The first run of a model trains without a limit and measures the peak load and
the floor, which is the lowest limit of any schedule. The other runs have limits: fractions of the peak load,
and 1.1 times the floor. *Reserved* is the most memory that the pool held at once, as a fraction of the limit:
over all steps, and over the steps since the pool has an arena. *Beside* is the growth of the process's
resident set up to its maximum in the last steps, less the limit and the copies on the host. It is the heap of
PyTorch and Python, and equal for all limits if the pool's counts are right. The hit rate is that of the last
steps.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_process

from mempool.demo.worker import forget_peak, resident_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))


SHARES = (0.9, 0.75, 0.6)
#: Ratio of the lowest limit to the floor.
NEAR = 1.1
#: Number of last steps, whose hits and resident set are measured.
LAST = 8
BATCH = 8


def models() -> dict[str, Any]:
    """Return the constructor of each model."""
    from models import CNN, GPT, ResNet, Seq2Seq, UNet

    return {"cnn": CNN, "resnet": ResNet, "unet": UNet, "lstm": Seq2Seq, "gpt": GPT}


class Warnings(logging.Handler):
    """Collects logged warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a message."""
        self.told.append(record.getMessage())


@contextlib.contextmanager
def planning() -> Iterator[list[float]]:
    """Measure the seconds of each attempt to plan a schedule."""
    from mempool.torch.eager.schedule_planner import SchedulePlanner

    seconds: list[float] = []
    made = SchedulePlanner._attempt

    def timed(self: SchedulePlanner, make: Any) -> Any:
        begin = time.perf_counter()
        try:
            return made(self, make)
        finally:
            seconds.append(time.perf_counter() - begin)

    SchedulePlanner._attempt = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        SchedulePlanner._attempt = made  # type: ignore[method-assign]


def train(name: str, limit: int | None, steps: int, *, background: bool) -> dict[str, Any]:
    """Train in this process; return the measurements."""
    import torch

    import mempool.torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings = Warnings()
    logging.getLogger("mempool").addHandler(warnings)
    _warm_up(name)
    base = resident_bytes("VmRSS")
    with planning() as seconds:
        pool = mempool.torch.install(device="cpu", background=background, limit=limit or 1 << 40)
        torch.manual_seed(0)
        model = models()[name]()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
        losses, reserved, outcomes, arena = [], [], [], None
        begin = time.perf_counter()
        for step in range(steps):
            if step == steps - LAST:
                forget_peak()
            pool.client.reset_peaks()
            optimizer.zero_grad()
            loss = model.loss(*model.batch(step, BATCH))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            del loss
            reserved.append(pool.core.stats()["recent_reserved_bytes"])
            outcomes.append(pool.client.stats()["outcomes"])
            if arena is None and pool.core.stats()["arena_bytes"]:
                arena = step
            if not background:
                pool.plan_now()
        took = time.perf_counter() - begin
        values = pool.report().to_dict()
        plan = pool.offloading.mode.iterations.schedule
        told: dict[str, Any] = {
            "limit": limit,
            "reserved": max(reserved),
            "reserved_after": None if arena is None else max(reserved[arena + 1 :], default=None),
            "by_step": reserved,
            "resident": resident_bytes("VmHWM") - base - values["swapping"]["host_bytes"],
            "arena_at": arena,
            "hit_rate": _hits(outcomes[-1], outcomes[-1 - LAST]),
            "plan_seconds": sum(seconds),
            "longest_plan": max(seconds, default=0.0),
            "seconds": took,
            "losses": hashlib.sha256(repr(losses).encode()).hexdigest()[:12],
            "warnings": warnings.told,
            "swapping": values["swapping"],
            "live": values["live_peak_bytes"],
        }
        if limit is None and plan is not None:
            told["floor"] = _floor(plan.recorded.step)
        pool.close()
    return told


def _warm_up(name: str) -> None:
    """Train one step, so that PyTorch's own lasting allocations precede the measurement."""
    import gc

    import torch

    model = models()[name]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    model.loss(*model.batch(0, BATCH)).backward()
    optimizer.step()
    del model, optimizer
    gc.collect()


def _hits(now: dict[str, int], before: dict[str, int]) -> float | None:
    from mempool.reporting.outcomes import missed

    hits, misses = now["hit"] - before["hit"], missed(now) - missed(before)
    outside = now["out_of_iteration"] - before["out_of_iteration"]  # swapping has the pool wait
    return hits / (hits + misses + outside) if hits + misses + outside else None


def _floor(step: Any) -> int:
    from solvers.swap import Link, OffloadPlanner

    return OffloadPlanner(step, Link.of_rate(4e9)).lowest_limit()


def run_separately(name: str, limit: int | None, steps: int, *, background: bool) -> dict[str, Any]:
    """Run `train` in a separate process."""
    return own_process.run_separately(__file__, name, limit, steps, background)


HEADER = (
    "| model | limit | KiB | reserved | with arena | beside MiB | arena at | hit rate | planned s | step ms "
    "| beyond | losses | warnings |\n" + "| --- " * 13 + "|"
)


def row(name: str, share: str, told: dict[str, Any], plain: dict[str, Any], steps: int) -> str:
    """Return the table row of a run."""
    if "error" in told:
        return f"| {name} | {share} | {told['error']} |"
    limit = told["limit"]
    after, rate = told["reserved_after"], told["hit_rate"]
    cells = [
        name,
        share,
        f"{limit >> 10:,}",
        f"{told['reserved'] / limit:.3f}",
        "-" if after is None else f"{after / limit:.3f}",
        f"{(told['resident'] - limit) / 2**20:.1f}",
        "-" if told["arena_at"] is None else str(told["arena_at"]),
        "-" if rate is None else f"{rate:.3f}",
        f"{told['plan_seconds']:.1f}",
        f"{1e3 * (told['seconds'] - told['plan_seconds']) / steps:.0f}",
        str(told["swapping"].get("beyond", "")),
        "the same" if told["losses"] == plain["losses"] else "OTHERS",
        str(len(told["warnings"])),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the chosen models and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--no-floor", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--background", action="store_true", help="plan in a thread, as users do")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, limit, steps, background = json.loads(given.one)
        print(json.dumps(train(name, limit, steps, background=background)))
        return
    found: dict[str, Any] = {}
    print(HEADER, flush=True)
    for name in given.only or models():
        plain = found[name] = run_separately(name, None, LAST + 4, background=False)
        whole = run_separately(name, 1 << 39, given.steps, background=given.background)
        limits = {f"{share:.0%}": int(share * plain["live"]) for share in given.shares}
        if not given.no_floor:
            limits["floor"] = int(NEAR * plain["floor"])
        for share, limit in limits.items():
            told = found[f"{name} {share}"] = run_separately(
                name, limit, given.steps, background=given.background
            )
            print(row(name, share, told, whole, given.steps), flush=True)
            if given.verbose and "warnings" in told:
                print(*told["warnings"], sep="\n")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
