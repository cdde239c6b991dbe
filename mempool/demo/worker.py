"""One process of the demonstration: trains with one allocator, some steps at a time, as its stdin tells it.

Lines in: ``steps N``, ``timed N``, ``end``. Lines out: one JSON object for each.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mempool import Pool
    from mempool.cupy import CupyPool

#: Framework -> (what trains in it, what it is called with, adapter).
FRAMEWORKS = {
    "numpy": ("mempool.demo.network", "numpy", "mempool.numpy"),
    "cupy": ("mempool.demo.network", "cupy", "mempool.cupy"),
    "torch": ("mempool.demo.torch_network", None, "mempool.torch"),
}


def best_framework() -> str:
    """CuPy where it is installed and there is a GPU, else NumPy."""
    from mempool import _core

    return "cupy" if importlib.util.find_spec("cupy") and _core.cuda_devices() else "numpy"


def title(framework: str) -> str:
    """What is trained, for people."""
    text: str = importlib.import_module(FRAMEWORKS[framework][0]).TITLE
    return text


class Worker:
    """A network in training, under one allocator."""

    def __init__(self, framework: str, allocator: str, plan: str | None) -> None:
        """Import all that either allocator needs, take the baseline, then begin.

        Args:
            framework: a key of `FRAMEWORKS`.
            allocator: "default", "pool" (iterations are marked) or "unmarked" (they are found).
            plan: where the pool's plan goes at the end.
        """
        network, arrays, adapter = FRAMEWORKS[framework]
        training, pools = importlib.import_module(network), importlib.import_module(adapter)
        with_arrays = () if arrays is None else (importlib.import_module(arrays),)
        # What a planner will import, so that it counts as baseline in every process.
        for name in ("mempool.planned", "mempool.report", "solvers", "traces.pattern", "traces.workload"):
            importlib.import_module(name)
        self.plan = plan
        training.warm_up(*with_arrays)
        self.on_gpu = framework == "cupy"
        self.baseline_bytes = resident_bytes("VmRSS")
        self.pool: Pool | CupyPool | None = None if allocator == "default" else pools.install()
        self.marks = allocator == "pool"
        self.data, self.network = training.Data(*with_arrays), training.Network(*with_arrays)

    def gpu_bytes(self) -> int:
        """What the allocator holds of the GPU; 0 where none is used."""
        pool = importlib.import_module("cupy").get_default_memory_pool() if self.on_gpu else None
        return 0 if pool is None else int(pool.total_bytes())

    def steps(self, count: int) -> dict[str, Any]:
        """Train; losses as hexadecimal floats, so that no bit is lost."""
        losses, seconds, faults = [], [], []
        for _ in range(count):
            begun, before = time.perf_counter(), page_faults()
            with self.pool.iteration() if self.pool is not None and self.marks else contextlib.nullcontext():
                losses.append(self.network.step(*self.data.batch()).hex())
            seconds.append(time.perf_counter() - begun)
            faults.append(page_faults() - before)
        return {"losses": losses, "seconds": seconds, "page_faults": faults}

    def end(self) -> dict[str, Any]:
        """Memory, and what the pool reports."""
        resident = max(resident_bytes("VmHWM") - self.baseline_bytes, 0)  # before the rest takes memory
        parameters = hashlib.sha256(b"".join(values.tobytes() for values in self.network.parameters))
        said = {"parameters": parameters.hexdigest(), "resident_bytes": resident, "report": None}
        said["gpu_bytes"] = self.gpu_bytes()
        if self.pool is not None:
            said["report"] = self.pool.report().to_dict()
            if self.pool.planned is not None and self.plan is not None:
                self.pool.save(self.plan)
        return said


def page_faults() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes(field: str) -> int:
    """Memory of this process as Linux counts it: "VmRSS" now, "VmHWM" at most."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def forget_peak() -> None:
    """Let "VmHWM" begin again from what is resident now, where Linux allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main(framework: str, allocator: str, plan: str | None = None) -> None:
    """Do what stdin says until it ends."""
    answers = sys.stdout
    worker = Worker(framework, allocator, plan)
    timed = False
    for line in sys.stdin:
        what, *count = line.split()
        if what == "timed" and not timed:
            forget_peak()  # the warm-up's, in which the pool records and plans
            timed = True
        answer = worker.end() if what == "end" else worker.steps(int(count[0]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
