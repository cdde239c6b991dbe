"""Parsing of option texts; an invalid text is a usage error."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def parsed(option: str, parse: Callable[[str], T], text: str | None) -> T | None:
    """Return the result of ``parse`` on an option's text; None for None.

    Raises:
        typer.BadParameter: ``parse`` raised a UsageError or ValueError; the message names the option.
    """
    from mempool.errors import UsageError

    try:
        return None if text is None else parse(text)
    except (UsageError, ValueError) as error:
        raise typer.BadParameter(f"{option}: {error}") from None
