"""Parsing of allocators as written on a command line: a name, and settings after a colon."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from mempool.analysis.compare import RECORDED, Choice
from mempool.errors import UsageError
from mempool.simulate import ALLOCATORS
from mempool.units import parse_bytes


def parse_choice(text: str) -> Choice:
    """Parse the name and settings of an allocator.

    Examples are "pytorch" and "pytorch:max_split_size_mb=128,garbage_collection_threshold=0.8".
    Values are numbers, true, false, none, or sizes such as 2MiB. Text without "=", as in
    ``PYTORCH_CUDA_ALLOC_CONF``, is passed unchanged to an allocator that has a setting ``conf``.

    Raises:
        ValueError: the allocator or a setting does not exist, or a value is not accepted.
    """
    name, _, rest = text.partition(":")
    if name not in ALLOCATORS and (name != RECORDED or rest):
        raise ValueError(f"no allocator {name!r}; there are {', '.join((RECORDED, *ALLOCATORS))}")
    if name == RECORDED:
        return Choice(name)
    known = [field.name for field in dataclasses.fields(ALLOCATORS[name]) if field.init]  # type: ignore[arg-type]
    settings = {"conf": rest} if rest and "=" not in rest and "conf" in known else _settings(rest)
    if unknown := sorted(settings.keys() - set(known)):
        raise ValueError(f"{name} has no setting {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        ALLOCATORS[name](**settings)  # checks the settings before a trace exists
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return Choice(name, settings)


def _settings(text: str) -> dict[str, Any]:
    settings = {}
    for part in filter(None, text.split(",")):
        key, given, value = part.partition("=")
        if not given:
            raise ValueError(f"{part!r} is not KEY=VALUE")
        settings[key.strip()] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float, parse_bytes):
        with contextlib.suppress(ValueError, UsageError):
            return convert(text)
    return text
