"""Worker process of the demonstration: trains with one allocator, controlled by lines on stdin.

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

#: (module of the network, array module, adapter) by framework.
FRAMEWORKS = {
    "numpy": ("mempool.demo.network", "numpy", "mempool.numpy"),
    "cupy": ("mempool.demo.network", "cupy", "mempool.cupy"),
    "torch": ("mempool.demo.torch_network", None, "mempool.torch"),
}


def best_framework() -> str:
    """Return "cupy" if CuPy is installed and a GPU exists, else "numpy"."""
    from mempool import _core

    return "cupy" if importlib.util.find_spec("cupy") and _core.cuda_devices() else "numpy"


def title(framework: str) -> str:
    """Return a readable description of the trained network."""
    text: str = importlib.import_module(FRAMEWORKS[framework][0]).TITLE
    return text


class Worker:
    """A network in training, under one allocator."""

    def __init__(self, framework: str, allocator: str, plan: str | None) -> None:
        """Import all modules of both allocators, measure the baseline, then start.

        Args:
            framework: a key of `FRAMEWORKS`.
            allocator: "default", "pool" (iterations are marked) or "unmarked" (iterations are detected).
            plan: file for the pool's plan at the end.
        """
        network, arrays, adapter = FRAMEWORKS[framework]
        training, pools = importlib.import_module(network), importlib.import_module(adapter)
        with_arrays = () if arrays is None else (importlib.import_module(arrays),)
        # The planner's imports count as baseline in every process.
        for name in (
            "mempool.planning.planned_pattern",
            "mempool.reporting.report",
            "solvers",
            "traces.iterations.pattern",
        ):
            importlib.import_module(name)
        self.plan = plan
        training.warm_up(*with_arrays)
        self.on_gpu = framework == "cupy"
        self.baseline_bytes = resident_bytes("VmRSS")
        self.pool: Pool | CupyPool | None = None if allocator == "default" else pools.install()
        self.marks = allocator == "pool"
        self.data, self.network = training.Data(*with_arrays), training.Network(*with_arrays)

    def gpu_bytes(self) -> int:
        """Return the allocator's reserved bytes on the GPU; 0 without a GPU."""
        pool = importlib.import_module("cupy").get_default_memory_pool() if self.on_gpu else None
        return 0 if pool is None else int(pool.total_bytes())

    def steps(self, count: int) -> dict[str, Any]:
        """Train; return losses as exact hexadecimal floats, with seconds and page faults."""
        losses, seconds, faults = [], [], []
        for _ in range(count):
            begun, before = time.perf_counter(), page_faults()
            with self.pool.iteration() if self.pool is not None and self.marks else contextlib.nullcontext():
                losses.append(self.network.step(*self.data.batch()).hex())
            seconds.append(time.perf_counter() - begun)
            faults.append(page_faults() - before)
        return {"losses": losses, "seconds": seconds, "page_faults": faults}

    def end(self) -> dict[str, Any]:
        """Return peak memory, a hash of the parameters and the pool's report; save the pool's plan."""
        resident = max(resident_bytes("VmHWM") - self.baseline_bytes, 0)  # before the next lines allocate
        parameters = hashlib.sha256(b"".join(values.tobytes() for values in self.network.parameters))
        said = {"parameters": parameters.hexdigest(), "resident_bytes": resident, "report": None}
        said["gpu_bytes"] = self.gpu_bytes()
        if self.pool is not None:
            said["report"] = self.pool.report().to_dict()
            if self.pool.planned is not None and self.plan is not None:
                self.pool.save(self.plan)
        return said


def page_faults() -> int:
    """Return the number of page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes(field: str) -> int:
    """Return this process's memory as counted by Linux: "VmRSS" now, "VmHWM" at most."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # no Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def forget_peak() -> None:
    """Reset "VmHWM" to the present resident memory, where Linux allows this."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main(framework: str, allocator: str, plan: str | None = None) -> None:
    """Execute the commands on stdin until the end of stdin."""
    answers = sys.stdout
    worker = Worker(framework, allocator, plan)
    timed = False
    for line in sys.stdin:
        what, *count = line.split()
        if what == "timed" and not timed:
            forget_peak()  # the peak of the warm-up, in which the pool records and plans
            timed = True
        answer = worker.end() if what == "end" else worker.steps(int(count[0]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
