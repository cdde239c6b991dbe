"""What is held where each batch has a size of its own.

    PYTHONPATH=. python tests/benchmarks/varied.py [--iterations 120] [--json FILE]

Training of each recorded network (`tests/sequences`), its sizes times a number of their own in each
iteration, at three sizes of GPU, under PyTorch's allocator and ours, simulated. Cells are the most bytes
that are held, in parts of the highest peak of the load. Where iterations are not marked, no plan has a place
for them; where they are, one plan has for all, and the second figure is of the last twenty.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from sequences import NETWORKS, varied

from mempool.simulate import simulate
from traces.trace import EventType, Trace

GIB = 1 << 30
PEERS = ("pytorch", "pytorch_expandable")
OURS = ("planned_online", "planned_growing")
LAST = 20


def held(trace: Trace, allocator: str) -> tuple[int, int]:
    """The most bytes in all of it, and in the last iterations."""
    reserved = simulate(trace, allocator).reserved
    ends = np.flatnonzero(trace.kind == EventType.MARK)
    return int(reserved.max()), int(reserved[ends[-LAST - 1] :].max())


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = []
    names = ["network", "peak, GiB", *PEERS, *OURS, *(f"{name}, marked" for name in OURS)]
    print("|", " | ".join(names), "|")
    print("|", " | ".join("---" for _ in names), "|")
    for most in (GIB // 4, 2 * GIB, 32 * GIB):
        for network in NETWORKS:
            trace = varied(network, most, chosen.iterations)
            marked = varied(network, most, chosen.iterations, marks=True)
            peak = int(trace.load().max())
            unmarked = {name: held(trace, name) for name in (*PEERS, *OURS)}
            planned = {name: held(marked, name) for name in OURS}
            rows.append({"network": network, "peak_bytes": peak, "held": unmarked, "held_marked": planned})
            cells = [f"{most_ / peak:.2f}" for most_, _ in unmarked.values()]
            cells += [f"{most_ / peak:.2f}, {last / peak:.2f}" for most_, last in planned.values()]
            print(f"| {network} | {peak / GIB:.2f} |", " | ".join(cells), "|", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
