"""What the text of an option means; a text that means nothing is an error of usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def parsed(option: str, parse: Callable[[str], T], text: str | None) -> T | None:
    """What ``parse`` makes of an option's text; None of None.

    Raises:
        typer.BadParameter: naming the option: ``parse`` raised a UsageError or ValueError.
    """
    from mempool.errors import UsageError

    try:
        return None if text is None else parse(text)
    except (UsageError, ValueError) as error:
        raise typer.BadParameter(f"{option}: {error}") from None
