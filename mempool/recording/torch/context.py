"""Context of an operation in the program: thread, module and phase."""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mempool.recording.optimizers import hooked_optimizer
from mempool.recording.torch.ledger import tensors_in
from mempool.recording.torch.rows import MODULE, THREAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mempool.recording.torch.ledger import Ledger

#: Phases of a row. RECOMPUTE is the recomputation of a checkpoint within the backward pass.
NONE, FORWARD, BACKWARD, OPTIMIZER, RECOMPUTE = range(5)

#: Most remembered module bounds, enough for some thousand steps; then the first half is dropped.
MOST_BOUNDS = 1 << 20

_task = torch._C._current_graph_task_id
_node = torch._C._current_autograd_node
_sequence = torch._C._autograd._get_sequence_nr


class Here:
    """One thread of the program.

    Attributes:
        index: number of the thread in the trace.
        head: the thread's bits of a row's head.
        place: the thread's and the module's bits.
        stack: (identity, number) of the entered modules, the innermost last.
        module: number of the innermost module, or -1.
    """

    __slots__ = ("head", "index", "module", "place", "stack")

    def __init__(self, index: int) -> None:
        self.index = index
        self.head = self.place = (index + 1) << THREAD
        self.stack: list[tuple[int, int]] = []
        self.module = -1


class Context:
    """Tracker of modules, optimizers and the backward pass, with hooks between `enter` and `leave`.

    Attributes:
        threads: the observed threads, by ident.
        optimizers: for each running step, the graph task and the depth of modules at its begin.
        told: the phase that the user declared last; FORWARD without a declaration.
    """

    def __init__(self, ledger: Ledger, step: Callable[[], None]) -> None:
        self._ledger = ledger
        self._step = step
        self.threads: dict[int, Here] = {}
        self._paths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._names: dict[str, int] = {}
        self._roots: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooked: dict[int, weakref.ref[Any]] = {}
        self._handles: list[Any] = []
        self._watched: weakref.ref[Any] | None = None
        # Node numbers of autograd at which modules begin and end; nodes are numbered in the forward pass's
        # order.
        self._bounds: list[int] = [0]
        self._modules_at: list[int] = [-1]
        self._owners: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.optimizers: list[tuple[int, int]] = []
        self._stepping: Any = None  # the code around an optimizer's step
        self.told = FORWARD

    @property
    def names(self) -> list[str]:
        """Paths of the modules, by number."""
        return list(self._names)

    # --- tensors that the program holds

    def add_module(self, root: torch.nn.Module) -> None:
        """Claim the tensors of a module and its submodules, and register their paths."""
        top = type(root).__name__
        for name, module in root.named_modules():
            if module not in self._paths:
                path = f"{top}.{name}" if name else top
                self._paths[module] = self._names.setdefault(path, len(self._names))
        self.own_module(root)

    def own_module(self, root: torch.nn.Module) -> None:
        """Claim the present tensors of a module and its submodules."""
        for module in root.modules():
            number = self._paths.get(module, -1)
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._own_parameter(parameter, number)
            for buffer in module._buffers.values():
                self._ledger.own_one("module_buffers", buffer, number)

    def _own_parameter(self, parameter: Any, module: int) -> None:
        self._ledger.own_one("parameters", parameter, module)
        self._ledger.own_one("gradients", parameter.grad, module)
        key = id(parameter)
        if (hooked := self._hooked.get(key)) is not None and hooked() is parameter:
            return
        self._hooked[key] = weakref.ref(parameter)
        self._owners[key] = self._hooked[key], module
        if parameter.requires_grad and parameter.is_leaf:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._has_gradient))

    def _owner(self, parameter: Any) -> int:
        known = self._owners.get(id(parameter))
        return known[1] if known is not None and known[0]() is parameter else -1

    def _has_gradient(self, parameter: Any) -> None:
        self._ledger.own_one("gradients", parameter.grad, self._owner(parameter))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Claim an optimizer's tensors; the optimizer's steps end the iterations."""
        self._watched = weakref.ref(hooked_optimizer(optimizer) or optimizer)
        self._own_parameters(optimizer)
        self._own_state(optimizer)

    def _own_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._own_parameter(parameter, self._owner(parameter))

    def _own_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            module = self._owner(parameter)
            for tensor in tensors_in(state):
                self._ledger.own_one("optimizer_state", tensor, module)

    # --- hooks

    def enter(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Install the hooks, and claim the existing tensors."""
        for module in modules:
            self.add_module(module)
            self._watch_inputs(module)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)
        hooks = torch.nn.modules.module
        self._handles += [
            hooks.register_module_forward_pre_hook(self._module_begins),
            hooks.register_module_forward_hook(self._module_ends, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]

    def leave(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    def _module_begins(self, module: torch.nn.Module, args: Any) -> None:
        here = self.here()
        number = self._paths.get(module)
        if not here.stack:
            if self.optimizers and not self._is_stepping():
                self.optimizers.clear()
            self._root(module, args, known=number is not None)
            number = self._paths[module]
        elif number is None:
            path = f"{self.names[here.module]}.{type(module).__name__}"
            self._paths[module] = number = self._names.setdefault(path, len(self._names))
        here.stack.append((id(module), number))
        self._is_in(here, number)

    def _root(self, module: torch.nn.Module, args: Any, *, known: bool) -> None:
        if known:
            self.own_module(module)
        else:
            self.add_module(module)
        if self._watch_inputs(module):
            self._own_inputs(args)  # the hook misses this call

    def _watch_inputs(self, module: torch.nn.Module) -> bool:
        """Claim the module's inputs, also by keyword, from the next call; return false if done before."""
        if module in self._roots:
            return False
        self._roots.add(module)
        self._handles.append(module.register_forward_pre_hook(self._inputs, with_kwargs=True))
        return True

    def _inputs(self, _: Any, args: Any, kwargs: Any) -> None:
        if len(self.here().stack) == 1:
            self._own_inputs((args, kwargs))

    def _own_inputs(self, given: Any) -> None:
        for tensor in tensors_in(given):
            if tensor.grad_fn is None and not isinstance(tensor, torch.nn.Parameter):
                self._ledger.own_input(tensor)

    def _module_ends(self, module: torch.nn.Module, *_: Any) -> None:
        here, key = self.here(), id(module)
        if any(entry[0] == key for entry in here.stack):
            while here.stack.pop()[0] != key:
                pass
        self._is_in(here, here.stack[-1][1] if here.stack else -1)

    def _is_in(self, here: Here, number: int) -> None:
        here.module, here.place = number, here.head | (number + 1) << MODULE
        at = _sequence()
        if here.index == 0 and at >= self._bounds[-1]:
            self._bounds.append(at)
            self._modules_at.append(number)
            if len(self._bounds) > MOST_BOUNDS:
                del self._bounds[1 : MOST_BOUNDS // 2], self._modules_at[1 : MOST_BOUNDS // 2]

    def _is_stepping(self) -> bool:
        """Return true if this thread is inside an optimizer's step; a failed step calls no end hook."""
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not self._stepping:
            frame = frame.f_back
        return frame is not None

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        self._stepping = sys._getframe(1).f_code
        self._own_parameters(optimizer)
        self.optimizers.append((_task(), len(self.here().stack)))

    def _step_ends(self, optimizer: Any, *_: Any) -> None:
        if self.optimizers:
            self.optimizers.pop()
        self._own_state(optimizer)
        if self._watched is None or self._watched() is None:
            self._watched = weakref.ref(optimizer)
        if self._watched() is optimizer:
            self._step()

    # --- place of an operation

    def here(self) -> Here:
        """Return the calling thread."""
        ident = threading.get_ident()
        found = self.threads.get(ident)
        return found or self.threads.setdefault(ident, Here(min(len(self.threads), 1000)))

    def phase_and_module(self, here: Here) -> tuple[int, int]:
        """Return phase and module of the thread's current operation."""
        task = _task()
        if self.optimizers:
            began, depth = self.optimizers[-1]
            if task == began and len(here.stack) == depth:
                return OPTIMIZER, -1
        if task == -1:
            return self.told, here.module
        if torch.is_grad_enabled():
            return RECOMPUTE, here.module
        return BACKWARD, here.module if here.stack else self._module_of_node()

    def _module_of_node(self) -> int:
        node: Any = _node()
        if node is None:
            return -1
        number = node._sequence_nr()
        if number >= 1 << 63:  # an AccumulateGrad node
            return self._owner(node.variable)
        return self._modules_at[bisect_right(self._bounds, number) - 1]
