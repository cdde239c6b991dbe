"""Inspection of a program at its first backward: optimizers, gradient accumulation, unused models."""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.fake.eight_bit_optimizers import STATE_BITS, overridden_bits, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, each with separate parameters and state, stepped in turn."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        groups = [group for part in self.parts for group in part.param_groups]
        settings = [part.defaults.keys() for part in self.parts]
        known = set(settings[0]).intersection(*settings[1:])
        super().__init__(
            [dict(group) for group in groups], {key: self.parts[0].defaults[key] for key in known}
        )
        self.param_groups = groups  # shared with the parts, so that a changed setting changes there too
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state  # share one state dictionary, so that callers find all state here

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as of the base
        """Step each optimizer."""
        for part in self.parts:
            part.step()


def copy_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[nn.Parameter]
) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that makes the same optimizers for other parameters, combined into one.

    Args:
        optimizers: at least one, latest first; a parameter shared by several belongs to the first.
        parameters: of the program's model that require gradients.

    Returns:
        A function of equally many other parameters in the same order; for another number of parameters the
        first optimizer gets all, since the model is no longer the program's.
    """
    at = {id(parameter): place for place, parameter in enumerate(parameters)}
    count = len(at)
    copies = [(optimizer_, groups) for optimizer_ in optimizers if (groups := _taken(optimizer_, at))][::-1]

    def made(parameters: Any) -> torch.optim.Optimizer:
        given: list[Any] = list(parameters)
        if len(given) != count or not copies:
            return _like(optimizers[0], given)
        parts = [
            _like(optimizer_, [{**own, "params": [given[k] for k in places]} for own, places in groups])
            for optimizer_, groups in copies
        ]
        return parts[0] if len(parts) == 1 else CombinedOptimizer(parts)

    return made


def _taken(optimizer: torch.optim.Optimizer, at: dict[int, int]) -> list[tuple[dict[str, Any], list[int]]]:
    """Return an optimizer's group settings with the places of their parameters, which are removed from `at`.

    Parameters whose state has its own number of bits are in groups of their own.
    """
    bits, found = overridden_bits(optimizer), []
    for group in optimizer.param_groups:
        own = {name: value for name, value in group.items() if name != "params"}
        for kind in dict.fromkeys(bits.get(id(parameter)) for parameter in group["params"]):
            mine = [p for p in group["params"] if id(p) in at and bits.get(id(p)) == kind]
            places = [at.pop(id(parameter)) for parameter in mine]
            found.append((own if kind is None else own | {STATE_BITS: kind}, places))
    return [(own, places) for own, places in found if places]


def _like(optimizer: torch.optim.Optimizer, given: Any) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and settings."""
    takes = inspect.signature(type(optimizer)).parameters
    given_settings = optimizer.defaults | settings_of(optimizer)
    settings = {key: value for key, value in given_settings.items() if key in takes}
    kind: Any = type(optimizer)
    found: torch.optim.Optimizer = kind(given, **settings)
    return found


@dataclass(frozen=True)
class Accumulation:
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


def accumulation(frames: Iterable[FrameType]) -> Accumulation | None:
    """Find a library's setting, or ``if step % batches == 0:`` with a ``zero_grad()`` inside.

    Args:
        frames: of the program at the backward, innermost first.

    Returns:
        The first accumulation of more than one batch, for lines with a divisor that is a name or a number;
        None without accumulation.
    """
    frames = list(frames)
    return _of_library(frames) or _of_lines(frames)


def _of_library(frames: Iterable[FrameType]) -> Accumulation | None:
    """Return the setting of a library's trainer among the variables."""
    for frame in frames:
        for value in list(frame.f_locals.values()):
            for kind in type(value).__mro__:
                known = _LIBRARIES.get((kind.__module__.partition(".")[0], kind.__name__))
                batches = known and known(value)
                if isinstance(batches, int) and batches > 1:
                    return Accumulation(
                        f"the {kind.__name__} of {kind.__module__.partition('.')[0]}", batches
                    )
    return None


def _of_lines(frames: Iterable[FrameType]) -> Accumulation | None:
    """Return the accumulation that the source around the backward states."""
    for frame in frames:
        for test in _tests(frame):
            for node in ast.walk(test):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
                    batches = _value(node.right, frame)
                    if isinstance(batches, int) and batches > 1:
                        return Accumulation(f"{frame.f_code.co_filename}:{test.lineno}", batches)
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


def unused_models(known: Iterable[torch.Tensor]) -> list[tuple[str, int]]:
    """Return classes and bytes of live fake models with uncounted parameters, outermost modules only.

    Args:
        known: parameters and buffers that are counted elsewhere.
    """
    gc.collect()  # remove unused models, which a real run frees sooner or later
    mode, counted = active_fake_mode(), {id(tensor) for tensor in known}
    alive = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    inner = {id(child) for module in alive for child in module.children()}
    found = []
    for module in alive:
        if id(module) in inner:
            continue
        new = {
            id(tensor): tensor
            for tensor in (*module.parameters(), *module.buffers())
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and id(tensor) not in counted
        }
        if any(isinstance(tensor, nn.Parameter) for tensor in new.values()):
            counted |= set(new)
            found.append((type(module).__name__, sum(t.untyped_storage().nbytes() for t in new.values())))
    return found
