"""Run the code blocks of a Markdown page in order, in the current folder: run_page.py PAGE.

Blocks marked ``python`` share one namespace. Blocks marked ``console`` hold commands behind "$ ", and below
each what it prints, where "..." stands for anything; without any output below it a command must only
succeed. A block below the comment ``<!-- not run: reason -->`` is left out.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<skip><!-- not run: .+ -->\n\n?)?```(?P<kind>python|console)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_ALIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A code block; ``line`` is the number of its first line of code, from 1."""

    kind: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Return the blocks of a page to run."""
    return [
        Block(match["kind"], match["code"], text.count("\n", 0, match.start("code")) + 1)
        for match in _FENCE.finditer(text)
        if match["skip"] is None
    ]


def run_console(block: Block, page: Path) -> None:
    """Run each command and compare its output, errors included."""
    for at, part in enumerate(re.split(r"^\$ ", block.code, flags=re.MULTILINE)):
        if at == 0:
            assert not part.strip(), f"{page}:{block.line}: output before the first command"
            continue
        command, _, wanted = part.partition("\n")
        done = subprocess.run(
            command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        where = f"{page}:{block.line}: $ {command}\n"
        assert done.returncode == 0 or wanted, f"{where}exit code {done.returncode}\n{done.stdout}"
        if wanted.strip():
            same = doctest.OutputChecker().check_output(wanted, done.stdout, _ALIKE)
            assert same, f"{where}printed\n{done.stdout}instead of\n{wanted}"


def run(page: Path) -> None:
    """Run the blocks of a page."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    namespace = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        if block.kind == "console":
            sys.stdout.flush()
            run_console(block, page)
        else:  # preceding empty lines make tracebacks show the line of the page
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
