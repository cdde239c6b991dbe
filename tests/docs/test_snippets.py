"""The code of README and docs runs, and their links exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = (
    "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/mempool demo",
    "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest -n auto --dist loadfile",
)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Every Python and console block of a page runs, in order, and gives the output on the page."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MEMPOOL")}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", str(Path(__file__).with_name("run_page.py")), str(page)],
        cwd=tmp_path,
        env=environment | {"COLUMNS": "100", "NO_COLOR": "1", "MEMPOOL_REMEMBER": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_readme_has_the_two_commands() -> None:
    found = re.findall(r"^ *(python3 -m venv .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert tuple(found) == COMMANDS


def test_every_test_that_the_docs_name_exists() -> None:
    text = "".join(page.read_text() for page in PAGES)
    missing = []
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        path = ROOT / file
        if not path.exists() or (test and f"def {test}(" not in path.read_text()):
            missing.append(f"{file}::{test}")
    assert not missing
