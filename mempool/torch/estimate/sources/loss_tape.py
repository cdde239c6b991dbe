"""Tape of the operations that a program applies to a model's output, up to the backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mempool.torch.estimate.sources.abort_at_backward import place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

#: Names of functions that change an argument and return nothing.
_SETTERS = frozenset(("__setitem__", "__set__"))
#: Largest container among the variables whose parts are searched; a larger one is a data set.
_MOST_PARTS = 100


@dataclass(frozen=True)
class Entry:
    """An operation as called.

    Attributes:
        function: PyTorch's, with arguments and result.
        shapes: shapes of the tensors among the arguments, before an in-place operation could change them.
        gradients: whether gradients were recorded.
        autocast: lower precision of the active autocast; None: no autocast.
        line: file and line of the program.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    shapes: tuple[torch.Size, ...]
    gradients: bool
    autocast: torch.dtype | None
    line: str

    @property
    def name(self) -> str:
        """Return the name of the function."""
        return str(getattr(self.function, "__name__", self.function))

    @property
    def in_place(self) -> bool:
        """Return whether the operation changes or returns an argument."""
        given = {id(leaf) for leaf in tensors_in((self.args, self.kwargs))}
        return self.name in _SETTERS or any(id(leaf) in given for leaf in tensors_in(self.result))


@dataclass
class Tape:
    """Operations since a model returned.

    Attributes:
        running: whether a model has returned an output to record from.
        entries: in the order of the program.
        losses: tensors at which a backward began.
        held: identities of the tensors that variables of the program hold during the backward.
    """

    running: bool = False
    entries: list[Entry] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    held: frozenset[int] = frozenset()

    def restart(self) -> None:
        """Clear the tape and start recording: a model has returned an output that can be trained."""
        self.running = True
        self.entries.clear()

    def stop(self, losses: Any, variables: Iterable[Any]) -> None:
        """End the tape at a backward; the computation of the loss is on the tape."""
        self.running = False
        self.losses = list(tensors_in(losses))
        self.held = frozenset(id(leaf) for leaf in tensors_in(list(map(_parts, variables))))

    def call(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], autocast: torch.dtype | None
    ) -> Any:
        """Call a function, and record the call if a tensor is made or changed."""
        if function is torch.Tensor.__iter__:
            return iter(self.call(torch.Tensor.unbind, args, kwargs, autocast))
        shapes = tuple(leaf.shape for leaf in tensors_in((args, kwargs)))
        result = function(*args, **kwargs)
        if getattr(function, "__name__", "") in _SETTERS or next(tensors_in(result), None) is not None:
            gradients = torch.is_grad_enabled()
            made = Entry(function, tuple(args), kwargs, result, shapes, gradients, autocast, place())
            self.entries.append(made)
        return result


def tensors_in(given: Any) -> Iterator[Tensor]:
    """Yield the tensors in a structure, in order."""
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _parts(variable: Any) -> Any:
    """Return the parts of a small container, a tensor unchanged, and None for other values."""
    if isinstance(variable, (list, tuple, dict)) and len(variable) <= _MOST_PARTS:
        return list(variable.values()) if isinstance(variable, dict) else list(variable)
    return variable if isinstance(variable, torch.Tensor) else None
