"""Train the loops of `tests/gpu` on the stand-in for CUDA, and print the result beside an H100's.

    python tests/benchmarks/rehearsed_loops.py [--only LOOP ...] [--ways ALLOCATOR ...] [--json FILE]

Needs a CUDA build of PyTorch, and no GPU. Each loop and allocator has a process of its own, in which
`tests/gpu/worker.py` runs as on a GPU. The first table has the bytes that PyTorch reports without a limit,
the second the outcome within limits, which are multiples of the peak live bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import on_standin
from on_standin import in_child

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

GIB = 1 << 30
LOOPS = ("cnn", "gpt", "lengths")
WAYS = ("native", "expandable", "mempool", "growing")
LIMITED = ("lengths",)  #: loops that were run within a limit on the H100
SHARES = (1.1, 1.25)
#: GiB reserved at the end and at most on an H100 (`tests/gpu/compare.py`, 2026-11-27).
MEASURED = {
    ("cnn", "native"): (25.10, 25.10),
    ("cnn", "expandable"): (20.12, 20.12),
    ("cnn", "mempool"): (20.09, 25.61),
    ("cnn", "growing"): (18.65, 18.68),
    ("gpt", "native"): (16.72, 16.72),
    ("gpt", "expandable"): (17.65, 17.65),
    ("gpt", "mempool"): (17.79, 17.79),
    ("gpt", "growing"): (16.61, 17.64),
    ("lengths", "native"): (65.56, 65.56),
    ("lengths", "expandable"): (20.13, 20.13),
    ("lengths", "mempool"): (19.09, 21.11),
    ("lengths", "growing"): (18.48, 20.04),
}


def run(way: str, loop: str, limit: int | None = None) -> dict[str, Any]:
    """Run one loop in a process of its own; return what `tests/gpu/worker.py` measured, or the error."""
    import worker

    try:
        return in_child(
            *((worker.train, way, loop) if limit is None else (worker.train_within, way, loop, limit))
        )
    except SystemExit as error:
        return {"error": str(error).strip().splitlines()[-1]}


def free_row(loop: str, way: str, made: dict[str, Any]) -> list[str]:
    """Return the cells of a run without a limit, with the largest difference from the H100."""
    if "error" in made:
        return [loop, way, made["error"]]
    ends = [made[key] / GIB for key in ("reserved_bytes", "most_reserved_bytes")]
    measured = MEASURED[loop, way]
    difference = max((end / real - 1 for end, real in zip(ends, measured, strict=True)), key=abs)
    cells = [f"{size:.2f}" for size in (made["live_bytes"] / GIB, *ends, *measured)]
    return [loop, way, *cells, f"{100 * difference:+.1f} %"]


def limited_cell(made: dict[str, Any]) -> str:
    """Return how a run within a limit ended."""
    if "error" in made:
        return str(made["error"])
    if "out_of_memory" in made:
        return f"out of memory in step {made['steps'] + 1}"
    return f"{made['most_reserved_bytes'] / GIB:.2f} GiB"


def print_row(cells: list[str]) -> None:
    """Print a line of a table in Markdown."""
    print("|", " | ".join(cells), "|", flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=LOOPS, default=LOOPS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    with on_standin.loaded():
        import torch  # noqa: F401 - for all children

        import mempool.torch  # noqa: F401

        header = ["loop", "allocator", "live", "reserved", "most", "H100: reserved", "most", "difference"]
        print_row(header)
        print_row(["---"] * len(header))
        for loop in chosen.only:
            for way in chosen.ways:
                results[f"{loop} {way}"] = made = run(way, loop)
                print_row(free_row(loop, way, made))
        for loop in filter(chosen.only.__contains__, LIMITED):
            live = run("native", loop, 0)["live_bytes"]
            print(f"\n{loop}, {live / GIB:.2f} GiB live at most\n")
            print_row(["allocator", *(f"{share:g} times" for share in SHARES)])
            print_row(["---"] * (1 + len(SHARES)))
            for way in chosen.ways:
                runs = {share: run(way, loop, int(share * live)) for share in SHARES}
                results |= {f"{loop} {way} {share:g}": made for share, made in runs.items()}
                print_row([way, *map(limited_cell, runs.values())])
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
