"""What divergence costs: recorded sequences with differences injected, under the pool and naive policies.

    python tests/policy/compare.py [--seeds N] [--json]

Plays each of the sequences of `tests/sequences` as a training loop in which sixteen iterations of one kind go
otherwise, at random places, for each kind of difference. Prints, for each kind and policy: the hit rate in
those iterations and in the one after each; from a difference to the first of sixteen hits in a row,
allocations, the median; buffers handed out over others that are alive; and in the last line the bytes held
at most, as a multiple of the peak load, the mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from divergence import POLICIES, Cost, cost
from sequences import DIVERGENCES, NETWORKS


def measure(seeds: int) -> dict[str, dict[str, Cost]]:
    """By kind of difference and policy, over all networks and so many seeds."""
    told: dict[str, dict[str, Cost]] = {}
    for kind in DIVERGENCES:
        row = told[kind.__name__] = {policy: Cost() for policy in POLICIES}
        for policy, total in row.items():
            for name in NETWORKS:
                for seed in range(seeds):
                    total.add(cost(name, policy, kind, seed))
        print(kind.__name__, file=sys.stderr)
    return told


def cell(one: Cost) -> str:
    """A cell of the table."""
    wrong = f", {one.overlaps:,} over others" if one.overlaps else ""
    return f"{one.hit_rate():.1%}, {statistics.median(one.recoveries):g}{wrong}"


def print_table(told: dict[str, dict[str, Cost]]) -> None:
    """As in the docs."""
    print("| what goes otherwise |", " | ".join(POLICIES), "|")
    print("| --- |", " | ".join("---" for _ in POLICIES), "|")
    for kind, row in told.items():
        print(f"| {kind.replace('_', ' ')} |", " | ".join(cell(one) for one in row.values()), "|")
    held = [statistics.fmean(x for row in told.values() for x in row[policy].reserved) for policy in POLICIES]
    print("| bytes held |", " | ".join(f"{x:.2f}" for x in held), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs of each network, policy and kind")
    parser.add_argument("--json", action="store_true", help="the sums instead of the table")
    given = parser.parse_args()
    table = measure(given.seeds)
    if given.json:
        print(json.dumps({kind: {p: vars(c) for p, c in row.items()} for kind, row in table.items()}))
    else:
        print_table(table)
