"""Options that several verbs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

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


def allocators(*more: str) -> Callable[[str], list[str]]:
    """Return a function that completes the name of an allocator.

    Args:
        more: names that the verb accepts in addition to the common ones.
    """

    def complete(incomplete: str) -> list[str]:
        from mempool.simulate import ALLOCATORS

        return [name for name in (*more, *ALLOCATORS) if name.startswith(incomplete)]

    return complete
