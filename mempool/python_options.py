"""Options of Python's own command line, as in `sys.orig_argv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def python_options(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each option before the program, and its value, or None for a flag.

    A name is one letter, or a whole word that begins with two hyphens. The last option is "c" or "m" if code
    or a module is the program.
    """
    rest = iter(arguments)
    for argument in rest:
        if argument[:1] != "-" or argument == "-":
            return
        if argument.startswith("--"):  # only --check-hash-based-pycs leads to a program
            yield argument, next(rest, "")
            continue
        for at, letter in enumerate(argument[1:], start=2):
            if letter not in "cmWX":
                yield letter, None
                continue
            yield letter, argument[at:] or next(rest, "")
            if letter in "cm":
                return
            break
