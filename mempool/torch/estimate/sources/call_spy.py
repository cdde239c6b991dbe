"""Call spy: records a program's model calls, loss and optimizers, up to the first backward."""

from __future__ import annotations

import contextlib
import functools
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

from mempool.torch.estimate.inputs import batch_of
from mempool.torch.estimate.model_outputs import cache_tensors
from mempool.torch.estimate.sources.loss_replay import Tape, tensors_in
from mempool.torch.estimate.sources.program_control import (
    FirstBackward,
    frames,
    place,
    stop_at_next_line,
    suppress_saves,
)
from mempool.torch.estimate.sources.program_inspection import (
    Accumulation,
    accumulation,
    copy_optimizers,
    unused_models,
)
from mempool.torch.estimate.sources.value_decisions import later_decisions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass
class Call:
    """A model call by the program, not by another module.

    Attributes:
        held: whether the previous call's output was alive at the start of this call; without gradients only.
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
class CallRecord:
    """Record of a program's use of models.

    Attributes:
        calls: last call of each module with parameters, by the module's identity, latest last.
        tape: operations on the output of the last call through which a backward can go.
        optimizers: all optimizers made.
        trains: whether the program began a backward.
        passed_over: names of skipped functions that write tensors to files.
        swallowed: whether the program caught the stopping exception.
        unused: classes and bytes of models that were alive at the backward without having been called.
        accumulation: place where gradients of several batches add up before a step, if any.
        decisions: files and lines that decided on the course of the program by an unknown value.
        later: likewise, for lines after the backward, which did not run.
        eager: calls of compilers that were skipped, with their lines.
        clears_late: whether the program cleared gradients between the last forward and the backward.
        set_to_none: whether clearing frees gradients (True) or fills them with zeros.
        elsewhere: file and line at which another thread, where no call is recorded, trains a model; or "".
    """

    calls: dict[int, Call] = field(default_factory=dict)
    tape: Tape = field(default_factory=Tape)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    trains: bool = False
    passed_over: list[str] = field(default_factory=list)
    swallowed: bool = False
    unused: list[tuple[str, int]] = field(default_factory=list)
    accumulation: Accumulation | None = None
    decisions: list[str] = field(default_factory=list)
    later: list[str] = field(default_factory=list)
    eager: list[str] = field(default_factory=list)
    clears_late: bool = False
    set_to_none: bool = True
    elsewhere: str = ""
    _depth: int = 0
    _unrecorded: int = 0
    _thread: int = field(default_factory=threading.get_ident)
    _outputs: dict[int, list[weakref.ref[torch.Tensor]]] = field(default_factory=dict)  # by module's id
    _held: bool = False

    def enter(self, module: nn.Module, _: Any) -> None:
        """Note that a module is called.

        Raises:
            Trains: another thread calls a module that can be trained.
        """
        if threading.get_ident() != self._thread and _trained(module):
            self._abort_in_thread()
        if self._depth == 0:
            self._held = any(ref() is not None for ref in self._outputs.get(id(module), ()))
        self._depth += 1
        if self._unrecorded or any(True for _ in module.parameters()):
            self._unrecorded += 1

    def _abort_in_thread(self) -> NoReturn:
        """Stop the program because another thread trains, whose losses and backward are not recorded."""
        self.elsewhere = place()
        raise FirstBackward(lambda: None)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a module's call when the module returns or fails."""
        self._depth -= 1
        self._unrecorded -= bool(self._unrecorded)
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
        if trains:
            self.tape.restart()
            self.clears_late = False
        if not trains:
            leaves = list(tensors_in(output))
            self._outputs[id(module)] = [weakref.ref(tensor) for tensor in (*leaves, *cache_tensors(output))]
            # detached tensors of the same storages, so that the program alone holds its own
            output = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
        self.calls.pop(id(module), None)
        call = Call(module, args, kwargs, output, _autocast(), trains, times, held=self._held and not trains)
        self.calls[id(module)] = call

    @property
    def call(self) -> Call | None:
        """Return the last call through which a backward can go, else the last call."""
        calls = list(self.calls.values())
        best = [call for call in calls if call.trains] or calls
        return best[-1] if best else None

    def others(self) -> list[tuple[str, int]]:
        """Return names and new bytes of models and optimizers with parameters outside the called module."""
        known = set() if self.call is None else {id(p) for p in self.call.module.parameters()}
        found: list[tuple[str, int]] = []
        owners = [
            (type(call.module).__name__, list(call.module.parameters())) for call in self.calls.values()
        ]
        owners += [
            (
                f"what {type(made).__name__} trains beside it",
                [p for g in made.param_groups for p in g["params"]],
            )
            for made in self.optimizers
        ]
        for name, parameters in owners:
            new = {id(p): p for p in parameters if id(p) not in known}
            known |= set(new)
            if new:
                found.append((name, bytes_of(new.values())))
        return found

    def _known(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and buffers of the called models and the optimizers' parameters."""
        for call in self.calls.values():
            yield from call.module.parameters()
            yield from call.module.buffers()
        for made in self.optimizers:
            for group in made.param_groups:
                yield from group["params"]

    def step(self, _optimizer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Treat an optimizer's step as a backward, unless a closure of the step contains one."""
        if not any(map(callable, (*args[1:], *kwargs.values()))):
            self.backward()

    def clear(self, *, set_to_none: bool) -> None:
        """Note that the program clears gradients."""
        self.set_to_none = set_to_none
        self.clears_late = self.call is not None and self.call.trains

    def record(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of PyTorch, on the tape if it may be part of a loss."""
        if self._unrecorded or self.trains or not self.tape.running:
            return function(*args, **kwargs)
        self._unrecorded += 1  # inner functions are part of the recorded one
        try:
            return self.tape.call(function, args, kwargs, _autocast())
        finally:
            self._unrecorded -= 1

    def backward(self, losses: Any = ()) -> None:
        """Record the first backward, with the losses if known, and stop the program.

        Raises:
            Trains: always.
        """
        if threading.get_ident() != self._thread:
            self._abort_in_thread()
        if self.trains:  # the program holds on to the exception that stopped it
            self.swallow()
            stop_at_next_line(self.swallow)
        self.trains = True
        stack = frames()
        self.tape.stop(losses, (value for frame in stack for value in frame.f_locals.values()))
        self.unused, self.accumulation = unused_models(self._known()), accumulation(stack)
        self.later = [line for line in later_decisions(stack) if line not in self.decisions]
        raise FirstBackward(self.swallow)

    def has_parameter(self, tensors: Any) -> bool:
        """Return whether a parameter of the called module is among tensors."""
        own_ids = set() if self.call is None else {id(p) for p in self.call.module.parameters()}
        return any(id(tensor) in own_ids for tensor in tensors_in(tensors))

    def decide(self, line: str) -> None:
        """Record a line that decides by a value ("": none); in a library, the first line per caller."""
        known = {line_.partition(" (in ")[0] for line_ in self.decisions}
        if line and line.partition(" (in ")[0] not in known:
            self.decisions.append(line)

    def leave_eager(self, call: str) -> None:
        """Record a skipped call of a compiler."""
        if call not in self.eager:
            self.eager.append(call)

    def swallow(self) -> None:
        """Note that the program caught the stopping exception."""
        self.swallowed = True

    @property
    def batch(self) -> int | None:
        """Return the number of samples in the call's batch."""
        return None if self.call is None else batch_of((self.call.args, self.call.kwargs))

    def optimizer(self) -> Callable[..., torch.optim.Optimizer] | None:
        """Return a function that makes the called module's optimizers again, with the same parameters."""
        own_optimizers = self._optimizers()
        if not own_optimizers:
            return None
        assert self.call is not None
        return copy_optimizers(own_optimizers, [p for p in self.call.module.parameters() if p.requires_grad])

    def several(self) -> list[str]:
        """Return a note if several optimizers train the called module."""
        kinds = [type(made).__name__ for made in reversed(self._optimizers())]
        return [f"{', '.join(kinds)} train it, each its own parameters"] if len(kinds) > 1 else []

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that train the called module, latest first, each with own parameters."""
        left = set() if self.call is None else {id(p) for p in self.call.module.parameters()}
        found = []
        for made in reversed(self.optimizers):
            own = {id(p) for group in made.param_groups for p in group["params"]} & left
            if own:
                found.append(made)
                left -= own
        return found


@contextlib.contextmanager
def record_calls() -> Iterator[CallRecord]:
    """Record a program's actions in the block; the first backward ends the block with `FirstBackward`."""
    record = CallRecord()
    init, trace, fails = torch.optim.Optimizer.__init__, sys.gettrace(), threading.excepthook

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        record.optimizers.append(self)

    hooks = [
        modules.register_module_forward_pre_hook(record.enter),
        modules.register_module_forward_hook(record.leave, with_kwargs=True, always_call=True),
        register_optimizer_step_pre_hook(record.step),
        register_optimizer_step_post_hook(lambda *_: record.backward()),
    ]
    torch.optim.Optimizer.__init__ = made
    threading.excepthook = lambda given: None if given.exc_type is FirstBackward else fails(given)
    try:
        with (
            suppress_saves(record.passed_over.append),
            _own_functions(record),
            _clearing(record),
            _Functions(record),
        ):
            yield record
    finally:
        if record.swallowed:
            sys.settrace(trace)
        torch.optim.Optimizer.__init__ = init
        threading.excepthook = fails
        for hook in hooks:
            hook.remove()
            modules._global_forward_hooks_with_kwargs.pop(hook.id, None)  # remove() leaves this entry


@contextlib.contextmanager
def _clearing(record: CallRecord) -> Iterator[None]:
    """Record that an optimizer or a module clears gradients."""
    classes: tuple[Any, Any] = (torch.optim.Optimizer, nn.Module)
    before = [class_.zero_grad for class_ in classes]

    def watching(clear: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(clear)
        def cleared(self: Any, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - PyTorch's signature
            record.clear(set_to_none=set_to_none)
            clear(self, set_to_none)

        return cleared

    for class_, clear in zip(classes, before, strict=True):
        class_.zero_grad = watching(clear)
    try:
        yield
    finally:
        for class_, clear in zip(classes, before, strict=True):
            class_.zero_grad = clear


class _Functions(TorchFunctionMode):
    """Function mode that records operations on tensors, and the backward."""

    def __init__(self, record: CallRecord) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "backward":
            self.record.backward(args[0])
        return self.record.record(func, args, kwargs or {})


@contextlib.contextmanager
def _own_functions(record: CallRecord) -> Iterator[None]:
    """Record the functions of `torch.autograd` that PyTorch hands to no mode."""
    apply, backward, grad = (
        vars(torch.autograd.Function)["apply"],
        torch.autograd.backward,
        torch.autograd.grad,
    )

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return apply.__func__(kind, *args, **kwargs)

        call.__name__ = kind.__name__
        return record.record(call, args, kwargs)

    def went_backward(tensors: Any, *_: Any, **__: Any) -> None:
        record.backward(tensors)

    def gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("create_graph") and record.has_parameter(inputs):
            record.backward(outputs)
        return record.record(grad, (outputs, inputs, *args), kwargs)

    autograd: Any = torch.autograd
    autograd.Function.apply, autograd.backward, autograd.grad = classmethod(applied), went_backward, gradients
    try:
        yield
    finally:
        autograd.Function.apply, autograd.backward, autograd.grad = apply, backward, grad


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _trained(module: nn.Module) -> bool:
    return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _autocast() -> torch.dtype | None:
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None
