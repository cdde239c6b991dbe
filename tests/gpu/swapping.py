"""Swapping beside what people use today, on this machine's GPU: the table of each model.

    python tests/gpu/swapping.py [--only MODEL ...] [--json FILE] [--shares-only]

Without a GPU it says so and ends with 0; losses that differ from the plain run's end it with 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from runs import why_not

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))


def main() -> int:
    """Compare; 1 if a loss is another, or a run of ours failed."""
    if (reason := why_not("torch")) is not None:
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
