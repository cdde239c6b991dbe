"""State of the optimizers of a module's parameters: present state, and future state of the first step."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.compiled.options import TUNABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: Number of tensors of a parameter's size that an optimizer of PyTorch makes for each parameter in its first
#: step, by the options of the parameter's group. `Adagrad` makes its state earlier; `Adafactor` and `LBFGS`
#: make tensors of other sizes.
_STATE_TENSORS: dict[type, Callable[[dict[str, Any]], int]] = {
    torch.optim.Adadelta: lambda _: 2,
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.Adamax: lambda _: 2,
    torch.optim.ASGD: lambda _: 1,
    torch.optim.NAdam: lambda _: 2,
    torch.optim.RAdam: lambda _: 2,
    torch.optim.RMSprop: lambda group: 1 + (group["momentum"] > 0) + bool(group["centered"]),
    torch.optim.Rprop: lambda _: 2,
    torch.optim.SGD: lambda group: int(bool(group["momentum"])),
    torch.optim.SparseAdam: lambda _: 2,
}


def optimizer_states(parameters: Sequence[torch.nn.Parameter]) -> Iterator[Any]:
    """Yield the dictionaries, keyed by parameters, in which optimizers of any kind keep their state.

    The optimizers are found among the referrers of a few parameters, since a search for all would be slow. An
    optimizer that has none of these parameters is not found.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for holder in gc.get_referrers(*trained[:: max(len(trained) // TUNABLES.searched_parameters, 1)]):
        if isinstance(holder, dict) and isinstance(next(iter(holder), None), torch.nn.Parameter):
            yield from states_in(holder, parameters)


def states_in(holder: Mapping[Any, Any], parameters: Sequence[torch.nn.Parameter]) -> Iterator[Any]:
    """Yield the state of some parameters in one optimizer's dictionary keyed by parameters."""
    for parameter in parameters:
        if isinstance(state := holder.get(parameter), dict):
            yield from state.values()


def future_states(parameters: Sequence[torch.nn.Parameter]) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """Yield parameters without state, with the number of state tensors that the first step makes.

    Only PyTorch's own optimizers are known. All parameters of an optimizer count, also those of other
    modules.
    """
    for optimizer in _optimizers(parameters):
        count = _STATE_TENSORS.get(type(optimizer))
        if count is None:
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    yield parameter, count(group)


def _optimizers(parameters: Sequence[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have some of the parameters."""
    kinds = _kinds(torch.optim.Optimizer)
    mine = {id(parameter) for parameter in parameters}
    return [
        one
        for one in gc.get_objects()
        if type(one) in kinds
        and any(id(other) in mine for group in getattr(one, "param_groups", ()) for other in group["params"])
    ]


def _kinds(base: type) -> set[type]:
    """Return a class and all classes derived from it."""
    derived: list[type] = base.__subclasses__()
    return {base}.union(*map(_kinds, derived))
