"""Detection of gradient accumulation: set in a library, or written around the backward."""

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
    """A program's accumulation: the file and line, or the library, and the number of batches per step."""

    where: str
    batches: int


def _of_trainer(trainer: Any) -> Any:
    return trainer.args.gradient_accumulation_steps


def _of_accelerator(accelerator: Any) -> Any:
    return accelerator.gradient_accumulation_steps if accelerator.step else 1  # counted by accumulate() only


def _of_lightning(trainer: Any) -> Any:
    return trainer.accumulate_grad_batches


#: By library and class: a function that returns the number of batches per step.
_LIBRARIES = {
    ("transformers", "Trainer"): _of_trainer,
    ("accelerate", "Accelerator"): _of_accelerator,
    ("lightning", "Trainer"): _of_lightning,
    ("pytorch_lightning", "Trainer"): _of_lightning,
}


def adds_up(frames: Iterable[FrameType]) -> AddsUp | None:
    """Find a library's setting, or ``if step % batches == 0:`` with a ``zero_grad()`` inside.

    Args:
        frames: of the program at the backward, innermost first.

    Returns:
        The first accumulation of more than one batch, for lines with a divisor that is a name or a number;
        None without accumulation.
    """
    frames = list(frames)
    return _of_library(frames) or _of_lines(frames)


def _of_library(frames: Iterable[FrameType]) -> AddsUp | None:
    """Return the setting of a library's trainer among the variables."""
    for frame in frames:
        for value in list(frame.f_locals.values()):
            for kind in type(value).__mro__:
                known = _LIBRARIES.get((kind.__module__.partition(".")[0], kind.__name__))
                batches = known and known(value)
                if isinstance(batches, int) and batches > 1:
                    return AddsUp(f"the {kind.__name__} of {kind.__module__.partition('.')[0]}", batches)
    return None


def _of_lines(frames: Iterable[FrameType]) -> AddsUp | None:
    """Return the accumulation that the source around the backward states."""
    for frame in frames:
        for test in _tests(frame):
            for node in ast.walk(test):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                    batches = _value(node.right, frame)
                    if isinstance(batches, int) and batches > 1:
                        return AddsUp(f"{frame.f_code.co_filename}:{test.lineno}", batches)
    return None


def _tests(frame: FrameType) -> Iterator[ast.expr]:
    """Yield the conditions under which the frame's function clears gradients."""
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
    """Evaluate a number, variable or attribute without calling the program's code, except properties."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, frame), node.attr, None)
    return None
