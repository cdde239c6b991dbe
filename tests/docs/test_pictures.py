"""Pictures of the docs are what their command draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_picture_of_a_rewritten_graph_equals_the_output_of_its_command() -> None:
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "tests/benchmarks/rewriting_picture.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (ROOT / "docs/img/rewriting.svg").read_text()
