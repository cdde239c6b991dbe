"""Allocators as people name them on a command line: a name, and settings behind a colon."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from mempool.analysis.compare import RECORDED, Choice
from mempool.errors import UsageError
from mempool.settings import parse_bytes
from solvers.simulators import ALLOCATORS


def parse_choice(text: str) -> Choice:
    """The allocator of "pytorch" or "pytorch:max_split_size_mb=128,roundup_power2_divisions=4".

    Values are numbers, true, false, none or sizes such as 2MiB.

    Raises:
        ValueError: no such allocator or setting, or a value that it does not take.
    """
    name, _, rest = text.partition(":")
    if name not in ALLOCATORS and (name != RECORDED or rest):
        raise ValueError(f"no allocator {name!r}; there are {', '.join((RECORDED, *ALLOCATORS))}")
    settings: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, given, value = part.partition("=")
        if not given:
            raise ValueError(f"{part!r} is not KEY=VALUE")
        settings[key.strip()] = _value(value.strip())
    if name in ALLOCATORS:
        _check(name, settings)
    return Choice(name, settings)


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float, parse_bytes):
        with contextlib.suppress(ValueError, UsageError):
            return convert(text)
    return text


def _check(name: str, settings: dict[str, Any]) -> None:
    """Let the allocator's own class judge the settings, before there is a trace.

    Raises:
        ValueError: it does not take them.
    """
    kind = ALLOCATORS[name]
    known = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    if unknown := sorted(settings.keys() - set(known)):
        raise ValueError(f"{name} has no setting {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        kind(**settings)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
