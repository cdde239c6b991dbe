"""Whether a program lets gradients of several batches add up: from the lines around its backward."""

from __future__ import annotations

import ast
import linecache
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType


@dataclass(frozen=True)
class AddsUp:
    """Where a program steps after every so many batches: a line of it, and how many."""

    line: int
    batches: int


def adds_up(frames: Iterable[FrameType]) -> AddsUp | None:
    """What is written as ``if step % batches == 0:`` with a ``zero_grad()`` in it, where a backward begins.

    Args:
        frames: of the program, in its backward; the innermost first.

    Returns:
        The first one with a divisor that is a name or a number, above one; None if there is none.
    """
    for frame in frames:
        for test in _tests(frame):
            for node in ast.walk(test):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                    batches = _value(node.right, frame)
                    if isinstance(batches, int) and batches > 1:
                        return AddsUp(test.lineno, batches)
    return None


def _tests(frame: FrameType) -> Iterator[ast.expr]:
    """Conditions under which the frame's function lets gradients go."""
    code = frame.f_code
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return
    bodies: list[ast.AST] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == code.co_name
        and node.lineno <= frame.f_lineno <= (node.end_lineno or 0)
    ] or [tree]
    for node in ast.walk(bodies[-1]):
        if isinstance(node, ast.If) and any(_lets_go(part) for line in node.body for part in ast.walk(line)):
            yield node.test


def _lets_go(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "zero_grad"
    )


def _value(node: ast.expr, frame: FrameType) -> Any:
    """Of a number, a variable or an attribute; nothing of the program is called but for properties."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr, None)
    return None
