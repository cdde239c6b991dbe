"""Copies of a program's optimizers for the parameters of a model that is made again."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.estimate.fake.eight_bit_optimizers import STATE_BITS, overridden_bits, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn


class Together(torch.optim.Optimizer):
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


def made_again(
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
    planned = [(one, groups) for one in optimizers if (groups := _taken(one, at))][::-1]

    def made(parameters: Any) -> torch.optim.Optimizer:
        given: list[Any] = list(parameters)
        if len(given) != count or not planned:
            return _like(optimizers[0], given)
        parts = [
            _like(one, [{**own, "params": [given[k] for k in places]} for own, places in groups])
            for one, groups in planned
        ]
        return parts[0] if len(parts) == 1 else Together(parts)

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
