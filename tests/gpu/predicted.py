"""Peaks predicted by `mempool.torch.fit`, compared with PyTorch's counters on this machine's GPU.

    python tests/gpu/predicted.py [--stand-in] [--json FILE] [MODEL ...]

The script takes some minutes. Each model is trained in a separate process; with --stand-in on the stand-in
for an H100, with PyTorch's own allocator. The exit status is 0 without a GPU, and 1 if the error of a
predicted peak exceeds `BOUND` and `SLACK_BYTES`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from runs import finish, gpu_unavailable_reason, row_of, run_script, show

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

#: Largest error of a predicted peak, as a fraction of the measured peak; and a tolerance in bytes, the size
#: of a workspace of cuDNN or cuBLAS.
BOUND, SLACK_BYTES = 0.1, 96 << 20
MIB = 1 << 20
COLUMNS = (
    "model",
    "allocated",
    "predicted",
    "off",
    "reserved",
    "predicted",
    "used",
    "predicted",
    "context",
    "peak in",
)


def relative_error(row: dict[str, Any]) -> float:
    """Return the error of the predicted peak, as a fraction of the measured peak."""
    share: float = row["predicted_allocated"] / max(row["allocated"], 1) - 1
    return share


def cells(row: dict[str, Any]) -> list[str]:
    """Return the table cells of a model, with sizes in MiB."""
    if "error" in row:
        return [row["error"]]
    sizes = [f"{row[key] / MIB:,.0f}" for key in ("allocated", "predicted_allocated")]
    more = ("reserved", "predicted_reserved", "used", "predicted_used", "context")
    rest = [f"{row[key] / MIB:,.0f}" for key in more]
    return [*sizes, f"{relative_error(row):+.1%}", *rest, row["peak_operation"]]


def exceeds_bound(row: dict[str, Any]) -> bool:
    """Return true if the error of a prediction exceeds its bound."""
    away = abs(row["predicted_allocated"] - row["allocated"])
    return bool(away > max(BOUND * row["allocated"], SLACK_BYTES))


def run(name: str, *, stand_in: bool) -> dict[str, Any]:
    """Predict and train a model in a separate process."""
    if not stand_in:
        return row_of(*run_script("predicted_worker.py", name, seconds=300))
    import predicted_worker
    from on_standin import in_child

    try:
        return in_child(predicted_worker.compare, name)
    except SystemExit as error:
        return {"error": str(error).strip().splitlines()[-1]}


def main() -> int:
    """Print the table; return 1 if a prediction exceeds its bound or a process fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a key of `predicted_jobs.JOBS`")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", action="store_true", help="without a GPU, on the stand-in of an H100")
    chosen = parser.parse_args()
    if not chosen.stand_in and (reason := gpu_unavailable_reason("torch")) is not None:
        sys.stdout.write(f"nothing to compare: {reason}\n")
        return 0
    with contextlib.ExitStack() as stack:
        if chosen.stand_in:
            import on_standin

            stack.enter_context(on_standin.loaded())
        from predicted_jobs import JOBS

        rows = {name: run(name, stand_in=chosen.stand_in) for name in chosen.models or JOBS}
    missing = {name: row["missing"] for name, row in rows.items() if "missing" in row}
    rows = {name: row for name, row in rows.items() if name not in missing}
    show("predicted and measured, MiB", COLUMNS, {name: cells(row) for name, row in rows.items()})
    for name, what in missing.items():
        sys.stdout.write(f"{name}: left out, {what}\n")
    wrong = [f"{name}: {row['error']}" for name, row in rows.items() if "error" in row]
    wrong += [
        f"{name}: {relative_error(row):+.1%}"
        for name, row in rows.items()
        if "error" not in row and exceeds_bound(row)
    ]
    return finish(rows, wrong, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
