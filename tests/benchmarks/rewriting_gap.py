"""Optimality gap and duration of decisions about graphs.

    python tests/benchmarks/rewriting_gap.py [--graphs 300] [--layers 1430]

Small random networks against CP-SAT, at a random limit each; then a made-up deep one, in processor seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from offload_oracle import UnprovenError
from rewriting_nets import deep_net, limited_net
from rewriting_oracle import least_seconds

from solvers.errors import PlanError
from solvers.rewriting import apply_rewriting
from solvers.rewriting.decide import decide, least_limit
from solvers.rewriting.judge import simulate
from solvers.swap import Link


def gaps(graphs: int) -> None:
    found = []
    for seed in range(graphs):
        graph, link, limit = limited_net(seed)
        try:
            solved = least_seconds(graph, link, limit)
        except UnprovenError:
            print(f"seed {seed}: unproven")
            continue
        if solved is not None and simulate(graph, link).peak_bytes > limit:
            found.append(decide(graph, limit, link).seconds / solved[1] - 1)
    gap = np.array(found)
    exact = np.mean(gap < 1e-3)
    print(f"{len(gap)} graphs: {exact:.1%} exact, mean gap {gap.mean():.2%}, largest {gap.max():.1%}")


def speed(layers: int) -> None:
    graph, link = deep_net(layers), Link.of_rate(12e9)
    peak = simulate(graph, link).peak_bytes
    begin = time.process_time()
    least, _ = least_limit(graph, link)
    took = time.process_time() - begin
    print(f"{len(graph)} operations: the least is {least / peak:.1%} of the peak, {took:.2f} s")
    for share in (0.7, 0.5, 0.3, 0.2, 0.15):
        begin = time.process_time()
        try:
            made = decide(graph, int(share * peak), link)
        except PlanError as error:
            print(error)
            continue
        apply_rewriting(graph, made.rewriting)
        took = time.process_time() - begin
        swaps, again = len(made.rewriting.offloads), len(made.rewriting.recomputed)
        slower = made.seconds / made.plain_seconds - 1
        print(f"{share:.0%}: {slower:.1%} slower, {swaps} offloaded, {again} recomputed, {took:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--layers", type=int, default=1430)
    asked = parser.parse_args()
    gaps(asked.graphs)
    speed(asked.layers)
