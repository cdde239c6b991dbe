"""Parsers for the command line's names of models, optimizers, types and sizes, without imports."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Advice for models without a name on the command line.
IN_PYTHON = "fit a model of your own in Python: mempool.torch.fit(model, inputs)"
_FORMS = f"transformers:NAME, such as transformers:gpt2, or script.py with --main; {IN_PYTHON}"
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
        kind: "transformers" or "script"; "" for an optimizer or a loss.
        where: file of a script.
        name: name of a transformers configuration, of an optimizer or of a loss, or a path.
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


def parse_target(text: str) -> ModelSpec:
    """Parse ``transformers:gpt2``, ``transformers:LlamaConfig(hidden_size=64)`` or ``script.py``.

    Raises:
        UsageError: the text has none of these forms.
    """
    head, colon, rest = text.partition(":")
    if colon and head == "transformers":
        return _transformers(rest)
    if text.endswith((".py", ".pyw")):
        return ModelSpec("script", text, "")
    raise UsageError(f"{text!r} names no model; give {_FORMS}")


def parse_name(text: str) -> ModelSpec:
    """Parse ``adamw``, ``sgd+momentum`` or ``sgd(momentum=0.9)``.

    Raises:
        UsageError: the text has none of these forms.
    """
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


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a question with the known names closest to a wrong name; "" if none is close."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {', '.join(near)}?" if near else ""
