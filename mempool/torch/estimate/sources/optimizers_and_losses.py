"""Optimizers and losses by their names on the command line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.torch.model_spec import parse_name, parse_type, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mempool.torch.model_spec import ModelSpec

#: Elements of an 8-bit state per float32 scale.
BLOCK = 256
#: Smallest number of elements with an 8-bit state.
LEAST_8BIT = 4096
#: State values per element of a parameter, by name in `bitsandbytes.optim`.
MOMENTS = {
    "Adam8bit": 2, "AdamW8bit": 2, "Lion8bit": 1, "SGD8bit": 1, "RMSprop8bit": 1, "Adagrad8bit": 1,
}  # fmt: skip


class Blockwise(torch.optim.Optimizer):
    """Stand-in for an optimizer of bitsandbytes: the memory of its state, without steps and CUDA kernels.

    The layout, except for two tables of 1 KiB, is that of bitsandbytes 0.44 and later (`init_state` in its
    optim/optimizer.py).
    """

    moments = 2

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **settings: Any) -> None:
        super().__init__(params, {"lr": lr} | settings)

    @classmethod
    def state_of(cls, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of one parameter, without values."""
        eight = parameter.numel() >= LEAST_8BIT
        made = {}
        for number in range(1, cls.moments + 1):
            made[f"state{number}"] = parameter.new_empty(
                parameter.shape, dtype=torch.uint8 if eight else torch.float32
            )
            if eight:
                blocks = -(-parameter.numel() // BLOCK)
                made[f"absmax{number}"] = parameter.new_empty(blocks, dtype=torch.float32)
        return made

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as of the base
        """Make missing state, and access all tensors that an update accesses."""
        for parameter in [parameter for group in self.param_groups for parameter in group["params"]]:
            if parameter.grad is not None:
                if not self.state[parameter]:
                    self.state[parameter] = self.state_of(parameter)
                with torch.no_grad():
                    for tensor in (*self.state[parameter].values(), parameter):
                        tensor.mul_(1)


#: Stand-ins by the names of `bitsandbytes.optim`: "AdamW8bit", "Lion8bit", ...
STAND_INS = {
    name: type(name, (Blockwise,), {"moments": moments, "__module__": "bitsandbytes.optim"})
    for name, moments in MOMENTS.items()
}

#: Optimizers of `torch.optim` that step without a closure and take any parameter, by lower-case class name.
OPTIMIZERS = {
    name.lower(): name
    for name in (
        "AdamW", "Adam", "SGD", "Adafactor", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam",
        "ASGD", "Rprop",
    )
    if hasattr(torch.optim, name)
}  # fmt: skip

#: Optimizers of bitsandbytes by class name; "adamw_bnb_8bit" and "adamw-8bit" are alternative spellings.
_EIGHT_BIT = {name.lower(): made for name, made in STAND_INS.items()}


def optimizer_of(spec: ModelSpec) -> Callable[..., torch.optim.Optimizer]:
    """Return a function that makes an optimizer from a name such as ``adamw`` or ``sgd+momentum``.

    Raises:
        UsageError: the name is unknown.
    """
    arguments = dict(spec.arguments)
    name, _, more = spec.name.lower().partition("+")
    eight = _EIGHT_BIT.get(re.sub("bnb|[-_]", "", name))
    if (name not in OPTIMIZERS and eight is None) or more not in ("", "momentum"):
        raise UsageError(_unknown("optimizer", spec.name, [*OPTIMIZERS, "sgd+momentum", *_EIGHT_BIT]))
    made: Any = eight or getattr(torch.optim, OPTIMIZERS[name])
    if more:
        arguments.setdefault("momentum", 0.9)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        try:
            found: torch.optim.Optimizer = made(parameters, **arguments)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{spec}: {error}") from None
        return found

    return optimizer


def loss_of_name(spec: ModelSpec) -> Callable[[Any], torch.Tensor]:
    """Return a loss, a function of the output, by name, such as ``cross-entropy``.

    Raises:
        UsageError: the name is unknown.
    """
    if (found := LOSSES.get(spec.name.lower().replace("_", "-"))) is None or spec.arguments:
        raise UsageError(_unknown("loss", spec.name, list(LOSSES)))
    return lambda output: found(_tensor(output))


def resolve(attribute: str, name: str) -> Any:
    """Return the loss, optimizer or type of a name, as an attribute of a `Job`.

    Raises:
        UsageError: the name is unknown.
    """
    if attribute == "loss":
        return loss_of_name(parse_name(name))
    if attribute == "optimizer":
        return optimizer_of(parse_name(name))
    return getattr(torch, parse_type(name))


def _unknown(noun: str, name: str, known: list[str]) -> str:
    hint = suggestion(name.lower(), known) or f"there are {', '.join(known)}"
    return f"no {noun} {name!r}; {hint}"


def _tensor(output: Any) -> torch.Tensor:
    """Return the logits of a transformers output, else the first floating-point tensor."""
    logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    for leaf in pytree.tree_leaves(logits if logits is not None else output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    raise UsageError("the model's output has no floating tensor to take the loss of")


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    if logits.dim() > 2 and logits.size(1) < logits.size(-1) and logits.dim() == 3:
        logits = logits.flatten(0, 1)  # (tokens, classes), as in language models
    target = torch.zeros((logits.size(0), *logits.shape[2:]), dtype=torch.int64, device=logits.device)
    return functional.cross_entropy(logits, target)


#: Losses by name, as functions of the output; each makes its own target.
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cross-entropy": _cross_entropy,
    "mse": lambda output: functional.mse_loss(output, torch.zeros_like(output)),
    "l1": lambda output: functional.l1_loss(output, torch.zeros_like(output)),
    "bce-with-logits": lambda output: functional.binary_cross_entropy_with_logits(
        output, torch.zeros_like(output)
    ),
    "sum": torch.sum,
    "mean": torch.mean,
}
