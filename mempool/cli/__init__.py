"""The ``mempool`` command: one file per verb, whose docstring is its help."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with one of its documented codes."""
    if sys.argv[1:2] == ["run"]:
        from mempool.cli.launch import launch

        launch(sys.argv[2:])
    try:
        from mempool.cli.app import call

        code = call(sys.argv[1:])
    except KeyboardInterrupt:  # before there was anything to interrupt
        sys.stderr.write("mempool: interrupted\n")
        code = 130
    sys.exit(code)
