"""What `mempool.torch.fit` predicts against what PyTorch measures on this machine's GPU: a table.

    python tests/gpu/predicted.py [--stand-in] [--json FILE] [MODEL ...]

Some minutes. Each model is trained in a process of its own, with --stand-in on the stand-in of an H100, where
PyTorch's own allocator counts, too. Without a GPU it says so and ends with 0. It ends with 1 where the peak
that was predicted is further from the one measured than `BOUND` and `SLACK_BYTES` say.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from runs import finish, row_of, show, told, why_not

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

#: How far off a predicted peak may be, as a share of the one measured; and bytes that are let pass anyway,
#: since a workspace of cuDNN or cuBLAS more or less is that large.
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


def off(row: dict[str, Any]) -> float:
    """How far the predicted peak is from the one measured, as a share of it."""
    share: float = row["predicted_allocated"] / max(row["allocated"], 1) - 1
    return share


def cells(row: dict[str, Any]) -> list[str]:
    """One model's line, sizes in MiB."""
    if "error" in row:
        return [row["error"]]
    sizes = [f"{row[key] / MIB:,.0f}" for key in ("allocated", "predicted_allocated")]
    more = ("reserved", "predicted_reserved", "used", "predicted_used", "context")
    rest = [f"{row[key] / MIB:,.0f}" for key in more]
    return [*sizes, f"{off(row):+.1%}", *rest, row["peak_operation"]]


def too_far(row: dict[str, Any]) -> bool:
    """Whether a prediction is worse than is promised."""
    away = abs(row["predicted_allocated"] - row["allocated"])
    return bool(away > max(BOUND * row["allocated"], SLACK_BYTES))


def run(name: str, *, stand_in: bool) -> dict[str, Any]:
    """Predict and train a model in a process of its own."""
    if not stand_in:
        return row_of(*told("predicted_worker.py", name, seconds=300))
    import predicted_worker
    from on_standin import in_child

    try:
        return in_child(predicted_worker.compare, name)
    except SystemExit as error:
        return {"error": str(error).strip().splitlines()[-1]}


def main() -> int:
    """Run everything; 1 if a prediction is too far off or a process failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a key of `predicted_jobs.JOBS`")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stand-in", action="store_true", help="without a GPU, on the stand-in of an H100")
    chosen = parser.parse_args()
    if not chosen.stand_in and (reason := why_not("torch")) is not None:
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
    wrong += [f"{name}: {off(row):+.1%}" for name, row in rows.items() if "error" not in row and too_far(row)]
    return finish(rows, wrong, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
