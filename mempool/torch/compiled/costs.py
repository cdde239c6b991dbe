"""Seconds that each operation of a graph takes: from a roofline model or measured on this device."""

from __future__ import annotations

import functools
import operator
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mempool.hardware.gpu_throughput import rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.compiled.effects import is_pytorchs_own
from mempool.torch.compiled.workspaces import watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from mempool.hardware.gpu_throughput import Rates


def values_of(node_arguments: Any) -> Any:
    """Replace each node among a node's arguments by the traced value (``meta["val"]``)."""
    return torch.fx.map_arg(node_arguments, lambda one: one.meta.get("val"))


def by_roofline(rates: Rates | None = None) -> Callable[[fx.Node], float]:
    """Return a function for the roofline seconds of a node: the longer of arithmetic and memory time."""
    clock = Roofline(rates or rates_of())

    def seconds(node: fx.Node) -> float:
        if not isinstance(node.target, torch._ops.OpOverload):
            return 0.0
        args, kwargs, result = _traced(values_of((node.args, node.kwargs, node.meta.get("val"))))
        return 1e-9 * clock.nanoseconds(node.target, args, kwargs, result)

    return seconds


def _traced(values: Any) -> Any:
    """Replace symbolic sizes by plain numbers; comparing symbols would create guards."""
    storages: dict[int, torch.UntypedStorage] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not _is_symbolic(value):
            return number(value)
        own = value.untyped_storage()
        size = number(own.nbytes())
        storage = storages.setdefault(own._cdata, torch.UntypedStorage(size, device="meta"))
        form = (
            number(value.storage_offset()),
            *(tuple(map(number, one)) for one in (value.shape, value.stride())),
        )
        return torch.empty(0, dtype=value.dtype, device="meta").set_(storage, *form)

    with _disable_current_modes():
        return tree_map(plain, values)


def _is_symbolic(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(one, torch.SymInt) for one in numbers)


def number(value: Any) -> Any:
    """Return the hint (value during tracing) of a symbolic number; return any other value unchanged."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


@dataclass
class Measured:
    """Seconds and workspaces of operations, measured on this machine once per distinct call.

    Only PyTorch's own operators are run: others may count their calls or wait for other processes.

    An operation runs on tensors of the same shapes, strides and types as the arguments. The tensors hold
    small random numbers; indices are 0. After one warm-up run, the median of ``runs`` runs counts.

    Attributes:
        device: the device to run on.
        otherwise: the estimate for operations that cannot be run.
        runs: number of timed runs per distinct call.
        known: measured seconds by call.
        workspaces: measured workspace bytes by call.
    """

    device: torch.device | str = "cpu"
    otherwise: Callable[[fx.Node], float] = field(default_factory=by_roofline)
    runs: int = 5
    known: dict[Any, float] = field(default_factory=dict)
    workspaces: dict[Any, int] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> float:
        """Return the seconds of a node."""
        return self._known(node)[0]

    def workspace(self, node: fx.Node) -> int:
        """Return the workspace bytes of a node while the node runs; 0 if the node cannot be run.

        Operators that only a compiler inserts (namespace ``prims``) also have 0: run alone, such an operator
        is a program of several operations.
        """
        return 0 if getattr(node.target, "namespace", None) == "prims" else self._known(node)[1]

    def _known(self, node: fx.Node) -> tuple[float, int]:
        if not is_pytorchs_own(node):
            return self.otherwise(node), 0
        args, kwargs = tree_map(number, values_of((node.args, node.kwargs)))
        key = node.target, str(tree_map(_form, (args, kwargs)))
        if key not in self.known:
            self.workspaces[key] = 0
            self.known[key] = self._measure(node, args, kwargs, key)
        return self.known[key], self.workspaces[key]

    def _measure(self, node: fx.Node, args: Any, kwargs: Any, key: Any) -> float:
        state = torch.get_rng_state()
        try:
            args, kwargs = tree_map(self._real, (args, kwargs))
            with torch.no_grad():
                once = functools.partial(self._once, node.target, args, kwargs)
                _, self.workspaces[key] = watched(
                    lambda: node.target(*args, **kwargs), torch.device(self.device)
                )
                return statistics.median(once() for _ in range(self.runs))
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
            return self.otherwise(node)
        finally:
            torch.set_rng_state(state)

    def _once(self, operation: Any, args: Any, kwargs: Any) -> float:
        cuda = torch.device(self.device).type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        result = operation(*args, **kwargs)
        if cuda:
            torch.cuda.synchronize(self.device)
        spent = time.perf_counter() - begin
        del result
        return spent

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(self.device)
        if not isinstance(value, torch.Tensor):
            return value
        shape, stride = tuple(map(number, value.shape)), tuple(map(number, value.stride()))
        real = torch.empty_strided(shape, stride, dtype=value.dtype, device=self.device)
        if value.dtype.is_floating_point:
            return real.uniform_(0.1, 1.0)
        return real.zero_()


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(map(number, value.shape)), tuple(map(number, value.stride())), value.dtype
    return value


#: Share of an operation's stand-alone time that it adds to a fused kernel, if the operation neither reads its
#: arguments from memory nor writes its results to memory.
INSIDE = 0.2


def in_kernels(seconds: Callable[[fx.Node], float]) -> Callable[[fx.Node], float]:
    """Convert stand-alone times of operations into their times inside fused kernels.

    Only graph outputs and the inputs of an operation that cannot be fused, such as a matrix product, are
    written to memory.
    """
    from torch._functorch.partitioners import get_default_op_list

    known = get_default_op_list()

    @functools.cache
    def is_fused(node: fx.Node) -> bool:
        if node.op == "output" or node.target is operator.getitem:
            return node.target is operator.getitem and all(map(is_fused, node.users))
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        pointwise = torch.Tag.pointwise in node.target.tags
        detached = node.target is torch.ops.aten.detach.default
        return pointwise or detached or known.is_fusible(node) or known.is_view(node)

    def told(node: fx.Node) -> float:
        inside = is_fused(node) and bool(node.users) and all(map(is_fused, node.users))
        return INSIDE * seconds(node) if inside else seconds(node)

    return told
