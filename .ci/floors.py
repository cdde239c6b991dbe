"""Print the oldest versions that pyproject.toml allows, one requirement a line; arguments are extras."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def floors(extras: list[str]) -> list[str]:
    """The run-time, build and extra requirements, pinned to what stands after ``>=``."""
    table = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    wanted = list(table["build-system"]["requires"]) + list(table["project"]["dependencies"])
    for extra in extras:
        own = table["project"]["optional-dependencies"][extra]
        wanted += [one for one in own if not one.startswith("mempool[")]
    return [_pinned(requirement) for requirement in wanted]


def _pinned(requirement: str) -> str:
    match = re.fullmatch(r"([\w.-]+)(\[.*\])?>=([\d.]+)(,.*)?", requirement)
    assert match, f"{requirement!r} has no oldest version"
    version = match[3].split(".")
    return f"{match[1]}=={match[3]}" if len(version) > 2 else f"{match[1]}=={'.'.join([*version, '0'][:2])}.*"


if __name__ == "__main__":
    sys.stdout.write("\n".join(floors(sys.argv[1:])) + "\n")
