"""Help of the command: verbs grouped by question, and flags without a type."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

SCREEN = """\
Usage: mempool VERB ...      (mempool VERB --help shows options and examples)

Use less memory
  run       Run an unchanged program with the pool, or within a limit
  demo      What does the pool gain? A small training, with it and without
  diagnose  What is installed, and what is in the way? For bug reports
Will it fit?
  rehearse  What will this CUDA program hold? Run it without a GPU
  fit       Does this model fit a GPU? Predict it without GPU and memory
Where does memory go?
  info      What is in this trace, snapshot or log? Who owns the peak?
  show      Draw buffers and addresses over time, as a page
  compare   What would other allocators and settings have reserved?
Plans and files
  plan      Give every buffer of a trace an offset in a small arena
  check     Does this plan hold for this trace?
  swap      Which buffers leave the device, and when, to keep a limit?
  convert   Write a trace as Parquet, or its buffers as CSV

Options: -h, --help, --version, --install-completion, --show-completion
Exit codes: 0 ok, 1 the answer is no, 2 usage, 3 a bad file, 4 failed,
130 Ctrl-C
"""


class Command(TyperCommand):
    """Verb whose help shows flags without the type `bool`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_bool_flag", False):
                param.metavar = ""
        return params


class Group(TyperGroup):
    """The command `mempool`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the verbs by question."""
        formatter.write(SCREEN)
