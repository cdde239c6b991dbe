"""Parsers for the command line's names of models, inputs and sizes; nothing is imported or made."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, field
from typing import Any

from mempool.errors import UsageError

_FORMS = "package.module:name, script.py:name, transformers:gpt2, or with --main script.py"
#: Element types by common names; the values are PyTorch's names.
TYPES = {
    name: name
    for name in (
        "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
        "bool", "uint8", "int8", "int16", "int32", "int64",
    )
} | {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16", "float": "float32",
    "fp32": "float32", "f32": "float32", "double": "float64", "fp64": "float64", "int": "int32",
    "long": "int64",
}  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """A parsed name with optional arguments.

    Attributes:
        kind: "transformers", "script" or "module"; "" for a bare name.
        where: file of a script, or dotted name of a module.
        name: name inside the script or module; for transformers, the name of a configuration or a path; ""
            for any.
        arguments: keyword arguments.
    """

    kind: str
    where: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self.arguments.items())
        place = f"{self.kind if self.kind == 'transformers' else self.where}:{self.name}".strip(":")
        return f"{place}({given})" if given else place


@dataclass(frozen=True)
class InputSpec:
    """One tensor of a model's input.

    Attributes:
        name: name of the argument; "" for a positional one.
        type: PyTorch's name of the element type.
        shape: sizes as products of factors: numbers, "B" for the batch or "S" for the sequence length.
    """

    name: str
    type: str
    shape: tuple[tuple[int | str, ...], ...]

    def sizes(self, batch: int, seq: int | None) -> tuple[int, ...]:
        """Return the sizes in elements.

        Raises:
            UsageError: the shape has an S, and there is no length.
        """
        known = {"B": batch, "S": seq}
        factors = [[known.get(f, f) if isinstance(f, str) else f for f in size] for size in self.shape]
        if any(factor is None for size in factors for factor in size):
            raise UsageError("the inputs have an S: give the sequence's length with --seq")
        return tuple(math.prod(int(f) for f in size if f is not None) for size in factors)


def parse_target(text: str) -> ModelSpec:
    """Parse ``package.module:function(key=value)``, ``script.py:name`` or ``transformers:gpt2``.

    Raises:
        UsageError: the text has none of these forms.
    """
    head, colon, rest = text.partition(":")
    if colon and head == "transformers":
        return _transformers(rest)
    if script := re.fullmatch(r"(.+\.pyw?)(?::(.+))?", text, re.DOTALL):
        name, arguments = _call(script[2]) if script[2] else ("", {})
        return ModelSpec("script", script[1], name, arguments)
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", head):
        raise UsageError(f"{text!r} names no model; give {_FORMS}")
    if colon and not rest:
        raise UsageError(f"{text!r} ends at the colon; give {_FORMS}")
    name, arguments = _call(rest) if colon else ("", {})
    return ModelSpec("module", head, name, arguments)


def parse_name(text: str) -> ModelSpec:
    """Parse ``adamw``, ``sgd(momentum=0.9)`` or ``package.module:function``.

    Raises:
        UsageError: the text has none of these forms.
    """
    if ":" in text.partition("(")[0]:
        return parse_target(text)
    head, plus, option = text.partition("(")[0].partition("+")
    name, arguments = _call(head.strip() + text[len(head + plus + option) :])
    return ModelSpec("", "", f"{name}{plus}{option.strip()}", arguments)


def _transformers(rest: str) -> ModelSpec:
    if not rest:
        raise UsageError("transformers: what? Such as transformers:gpt2, or a folder with a config.json")
    if "(" not in rest:
        return ModelSpec("transformers", "", rest)
    name, arguments = _call(rest)
    return ModelSpec("transformers", "", name, arguments)


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``name`` or ``name(key=literal)``; names may have dots, dashes and slashes."""
    match = re.fullmatch(r"([\w.\-/]+)\s*(\(.*\))?", text.strip(), re.DOTALL)
    if match is None:
        raise UsageError(f"{text!r} is neither a name nor name(key=value)")
    if match[2] is None:
        return match[1], {}
    try:
        call = ast.parse(f"f{match[2]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError
        return match[1], {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(
            f"{text!r}: between the brackets stand key=value, with numbers, texts, lists and dictionaries"
        ) from None


def parse_inputs(text: str) -> tuple[InputSpec, ...]:
    """Parse a model's inputs, such as ``float32[B,3,224,224] labels=int64[B]``.

    Raises:
        UsageError: the text has no inputs, or a part is invalid; the message names the part.
    """
    found = []
    for part in re.findall(r"[^\s\[\]]*\[[^\]]*\]|\S+", text.replace(";", " ")):
        match = re.fullmatch(r"(?:([^\W\d]\w*)=)?(\w*)\[([^\]]*)\]", part.strip(",;"))
        if match is None or (kind := TYPES.get((match[2] or "float32").lower())) is None:
            raise UsageError(
                f"{part!r} is no input: say TYPE[SIZES] or NAME=TYPE[SIZES], such as float32[B,3,224,224], "
                f"with types {', '.join(dict.fromkeys(TYPES.values()))}"
            )
        sizes = [size for size in match[3].replace(" ", "").split(",") if size]
        found.append(InputSpec(match[1] or "", kind, tuple(_factors(size, part) for size in sizes)))
    if not found:
        raise UsageError("no inputs: say such as float32[B,3,224,224]")
    return tuple(found)


def _factors(size: str, part: str) -> tuple[int | str, ...]:
    if not re.fullmatch(r"(\d{1,12}|[BS])(\*(\d{1,12}|[BS]))*", size, re.IGNORECASE):
        raise UsageError(f"{size!r} in {part!r} is no size: numbers, B for the batch, S for --seq, and 2*B")
    return tuple(int(f) if f.isdigit() else f.upper() for f in size.split("*"))


def parse_sizes(text: str) -> list[int]:
    """Return the positive numbers of ``8`` or ``1,2,4`` in order, without duplicates.

    Raises:
        UsageError: the text is no such list.
    """
    parts = text.replace(" ", "").split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts):
        raise UsageError(f"{text!r} is no number, or list of numbers such as 1,2,4, from 1 on")
    return list(dict.fromkeys(map(int, parts)))


def parse_type(text: str) -> str:
    """Return PyTorch's name of a type, such as "bfloat16" for "bf16".

    Raises:
        UsageError: the type is unknown.
    """
    if (found := TYPES.get(text.strip().lower().removeprefix("torch."))) is None:
        raise UsageError(f"no type {text!r}; there are {', '.join(TYPES)}")
    return found
