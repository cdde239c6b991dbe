"""Swapping compared with other methods on this machine's GPU: one table for each model.

    python tests/gpu/swapping.py [--only MODEL ...] [--json FILE] [--shares-only]

The exit status is 0 without a GPU, and 1 if losses differ from those of the plain run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runs import gpu_unavailable_reason

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))


def main() -> int:
    """Print the tables; return 1 if losses differ or a run within a limit fails."""
    if (reason := gpu_unavailable_reason("torch")) is not None:
        sys.stdout.write(f"nothing to compare: {reason}\n")
        return 0
    import swapping_peers

    wrong = [
        f"{name}: {way}: {row.get('error', 'other losses')}"
        for name, rows in swapping_peers.main("cuda").items()
        for way, row in rows.items()
        if way.startswith("ours") and row.get("losses") != rows["plain"].get("losses")
    ]
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
