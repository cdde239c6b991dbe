"""Options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Lenient = Annotated[
    bool, typer.Option("--lenient", help="Leave out events that cannot be, and count them, rather than stop.")
]
Frames = Annotated[
    bool, typer.Option("--frames", help="Source lines too, which are left out unless asked for.")
]
Device = Annotated[
    int | None,
    typer.Option("--device", metavar="N", help="Of a trace of several devices, this one; -1 is the host."),
]
