"""Options that several verbs share, and the parsing of option texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def completion(*names: str) -> Callable[[str], list[str]]:
    """Return a function that completes an option's value from `values`."""
    return lambda incomplete: [name for name in names if name.lower().startswith(incomplete.lower())]


def allocators(*more: str) -> Callable[[str], list[str]]:
    """Return a function that completes the name of an allocator.

    Args:
        more: additional names that the verb accepts.
    """

    def complete(incomplete: str) -> list[str]:
        from mempool.simulate import ALLOCATORS

        return [name for name in (*more, *ALLOCATORS) if name.startswith(incomplete)]

    return complete


def parsed(option: str, parse: Callable[[str], T], text: str | None) -> T | None:
    """Return ``parse(text)``, or None for None; errors name the option.

    Raises:
        typer.BadParameter: ``parse`` raised a UsageError or ValueError; the message names the option.
    """
    from mempool.errors import UsageError

    try:
        return None if text is None else parse(text)
    except (UsageError, ValueError) as error:
        raise typer.BadParameter(f"{option}: {error}") from None
