"""Pictures of the docs are what their command draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_picture_of_a_rewritten_graph_is_what_its_command_draws() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tests/benchmarks/rewriting_picture.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (ROOT / "docs/img/rewriting.svg").read_text()
