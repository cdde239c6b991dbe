"""What a program does with models: their calls, the loss, the optimizers; and that it begins to train."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mempool.torch.fitting.inputs import batch_of
from mempool.torch.fitting.model_outputs import cache_tensors
from mempool.torch.fitting.sources.accumulating import AddsUp, adds_up
from mempool.torch.fitting.sources.again import made_again
from mempool.torch.fitting.sources.idle import idle_models
from mempool.torch.fitting.sources.savers import unsaved
from mempool.torch.fitting.sources.stops import Trains, frames, place, stop_at_next_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss",
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "hinge_embedding_loss",
)  # fmt: skip


@dataclass
class Call:
    """A call of a model by the program, not by another module.

    Attributes:
        held: whether the output of the call before was alive when this one began; without gradients only.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    autocast: torch.dtype | None
    trains: bool
    times: int = 1
    held: bool = False


@dataclass
class Seen:
    """What was seen.

    Attributes:
        calls: the last one of each module with parameters, by its identity, the latest last.
        loss: function, arguments and result of the last loss.
        optimizers: all that were made.
        trains: whether the program began to go backward.
        passed_over: names of what would have written tensors to files.
        swallowed: whether it caught what stopped it.
        idle: models that were alive then and had not been called: classes, and bytes.
        adds_up: where it steps after several batches only.
        elsewhere: file and line where another thread, in which nothing is seen, trains a model; or "".
    """

    calls: dict[int, Call] = field(default_factory=dict)
    loss: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any] | None = None
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    trains: bool = False
    passed_over: list[str] = field(default_factory=list)
    swallowed: bool = False
    idle: list[tuple[str, int]] = field(default_factory=list)
    adds_up: AddsUp | None = None
    elsewhere: str = ""
    _depth: int = 0
    _thread: int = field(default_factory=threading.get_ident)
    _outputs: dict[int, list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)  # by module's id
    _held: bool = False

    def enter(self, module: nn.Module, _: Any) -> None:
        """A module is called.

        Raises:
            Trains: by another thread, where it can be trained.
        """
        if threading.get_ident() != self._thread and _trained(module):
            self._leave_it()
        if self._depth == 0:
            self._held = any(ref() is not None for ref in self._outputs.get(id(module), ()))
        self._depth += 1

    def _leave_it(self) -> NoReturn:
        """Another thread trains: nothing sees its losses and its backward."""
        self.elsewhere = place()
        raise Trains(lambda: None)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """It returns, or fails."""
        self._depth -= 1
        if self.trains or self._depth or output is None or not any(True for _ in module.parameters()):
            return
        trains = _trained(module)
        before = self.calls.get(id(module))
        if before is not None and before.trains:
            if not trains:
                return
            times = before.times + 1
        else:
            times = 1
        if not trains:
            leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            self._outputs[id(module)] = [weakref.ref(one) for one in (*leaves, *cache_tensors(output))]
            # others of the same storages, so that the program alone holds its own
            output = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        self.calls.pop(id(module), None)
        call = Call(module, args, kwargs, output, _autocast(), trains, times, held=self._held and not trains)
        self.calls[id(module)] = call

    @property
    def call(self) -> Call | None:
        """The last one that a backward can go through, else the last one."""
        calls = list(self.calls.values())
        best = [call for call in calls if call.trains] or calls
        return best[-1] if best else None

    def others(self) -> list[tuple[str, int]]:
        """What else has parameters, beside the called module: names, and bytes that are in nothing before."""
        known = set() if self.call is None else {id(p) for p in self.call.module.parameters()}
        found: list[tuple[str, int]] = []
        things = [
            (type(call.module).__name__, list(call.module.parameters())) for call in self.calls.values()
        ]
        things += [
            (
                f"what {type(made).__name__} trains beside it",
                [p for g in made.param_groups for p in g["params"]],
            )
            for made in self.optimizers
        ]
        for name, parameters in things:
            new = {id(p): p for p in parameters if id(p) not in known}
            known |= set(new)
            if new:
                found.append((name, bytes_of(new.values())))
        return found

    def _known(self) -> Iterator[torch.Tensor]:
        """What the called models and the optimizers have."""
        for call in self.calls.values():
            yield from call.module.parameters()
            yield from call.module.buffers()
        for made in self.optimizers:
            for group in made.param_groups:
                yield from group["params"]

    def step(self, _optimizer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """An optimizer steps: behind a backward, unless it is given a closure, in which there is one."""
        if not any(map(callable, (*args[1:], *kwargs.values()))):
            self.backward()

    def backward(self) -> None:
        """The program goes backward.

        Raises:
            Trains: always.
        """
        if threading.get_ident() != self._thread:
            self._leave_it()
        if self.trains:  # it holds on to what stopped it
            self.swallow()
            stop_at_next_line(self.swallow)
        self.trains = True
        self.idle, self.adds_up = idle_models(self._known()), adds_up(frames())
        raise Trains(self.swallow)

    def swallow(self) -> None:
        """The program caught what stops it."""
        self.swallowed = True

    @property
    def batch(self) -> int | None:
        """Samples in the call's batch."""
        return None if self.call is None else batch_of((self.call.args, self.call.kwargs))

    def optimizer(self) -> Callable[..., torch.optim.Optimizer] | None:
        """What makes optimizers such as those that train the called module, of the same parameters."""
        mine = self._optimizers()
        if not mine:
            return None
        assert self.call is not None
        return made_again(mine, [p for p in self.call.module.parameters() if p.requires_grad])

    def several(self) -> list[str]:
        """That more than one optimizer trains the called module, if so."""
        kinds = [type(made).__name__ for made in reversed(self._optimizers())]
        return [f"{', '.join(kinds)} train it, each its own parameters"] if len(kinds) > 1 else []

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The last one that has parameters of the called module, and those that have others; latest first."""
        left = set() if self.call is None else {id(p) for p in self.call.module.parameters()}
        found = []
        for made in reversed(self.optimizers):
            own = {id(p) for group in made.param_groups for p in group["params"]} & left
            if own:
                found.append(made)
                left -= own
        return found

    def labelled_loss(self) -> tuple[Callable[[Any, Any], torch.Tensor], Any] | None:
        """The loss of the model's output, as a function of it and of labels, and the labels.

        None if it is not known to be a function of the output alone, perhaps in another shape.
        """
        if self.loss is None or self.call is None:
            return None
        function, args, kwargs, _ = self.loss
        given, rest = args[0], args[1:]
        leaves = [leaf for leaf in pytree.tree_leaves(self.call.output) if isinstance(leaf, torch.Tensor)]
        at = [k for k, leaf in enumerate(leaves) if leaf.numel() == given.numel() and leaf.dim() > 0]
        if not at:
            return None
        tail, same = given.shape[1:], leaves[at[0]].shape == given.shape

        def loss(output: Any, labels: Any) -> torch.Tensor:
            mine = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)][at[0]]
            found: torch.Tensor = function(mine if same else mine.reshape(-1, *tail), *labels[0], **labels[1])
            return found

        return loss, (rest, kwargs)


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """See what a program does in the block; its first backward ends it with `Trains`."""
    seen = Seen()
    init, trace, fails = torch.optim.Optimizer.__init__, sys.gettrace(), threading.excepthook

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        seen.optimizers.append(self)

    hooks = [
        modules.register_module_forward_pre_hook(seen.enter),
        modules.register_module_forward_hook(seen.leave, with_kwargs=True, always_call=True),
        register_optimizer_step_pre_hook(seen.step),
        register_optimizer_step_post_hook(lambda *_: seen.backward()),
    ]
    torch.optim.Optimizer.__init__ = made
    threading.excepthook = lambda given: None if given.exc_type is Trains else fails(given)
    try:
        with unsaved(seen.passed_over.append), _Functions(seen):
            yield seen
    finally:
        if seen.swallowed:
            sys.settrace(trace)
        torch.optim.Optimizer.__init__ = init
        threading.excepthook = fails
        for hook in hooks:
            hook.remove()
            modules._global_forward_hooks_with_kwargs.pop(hook.id, None)  # which remove() leaves there


class _Functions(TorchFunctionMode):
    """Sees losses and the backward."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "backward":
            self.seen.backward()
        result = func(*args, **(kwargs or {}))
        if name in _LOSSES and args and not self.seen.trains and self._is_better(result):
            self.seen.loss = func, args, kwargs or {}, result
        return result

    def _is_better(self, loss: Any) -> bool:
        """Not that of a validation behind the one that is gone backward through."""
        before = self.seen.loss
        return before is None or loss.requires_grad or not before[3].requires_grad


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Of their elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _trained(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _autocast() -> torch.dtype | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None
