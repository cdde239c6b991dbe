"""What is held where each batch has a size of its own, which no plan has a place for.

    PYTHONPATH=. python tests/benchmarks/varied.py [--iterations 40] [--json FILE]

Training of each recorded network (`tests/sequences`), its sizes times a number of their own in each
iteration, at three sizes of GPU, under PyTorch's allocator and ours, simulated. Cells are the most bytes
that are held, in parts of the highest peak of the load.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from sequences import NETWORKS, varied

from mempool.what_if import simulate

GIB = 1 << 30
ALLOCATORS = ("pytorch", "pytorch_expandable", "planned_online", "planned_growing")


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = []
    print("| network | peak, GiB |", " | ".join(ALLOCATORS), "|")
    print("| --- |", " | ".join("---" for _ in ["peak", *ALLOCATORS]), "|")
    for most in (GIB // 4, 2 * GIB, 32 * GIB):
        for network in NETWORKS:
            trace = varied(network, most, chosen.iterations)
            peak = int(trace.load().max())
            held = {name: simulate(trace, name).peak_reserved_bytes for name in ALLOCATORS}
            rows.append({"network": network, "peak_bytes": peak, "held_bytes": held})
            cells = " | ".join(f"{bytes_ / peak:.2f}" for bytes_ in held.values())
            print(f"| {network} | {peak / GIB:.2f} | {cells} |", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
