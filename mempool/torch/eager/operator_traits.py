"""Operator traits: declared and undeclared memory effects, computed once and read at each run."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch._subclasses.functional_tensor import FunctionalTensor

from mempool.logs import log
from mempool.recording.torch.ledger import is_wrapper, tensors_in
from mempool.recording.torch.operations import Operation, learn
from mempool.torch.eager import interposer

if TYPE_CHECKING:
    from types import FrameType

    from mempool.recording.torch.operations import Argument

#: Tensor classes that wrap no other tensor; most tensors are of these.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
#: Views that copy no sparse tensor; the same list as in operations.hpp.
_SHARE_SPARSE = frozenset(("_indices", "_values", "indices", "values", "detach", "alias"))
#: Operations whose footprint depends on data, or on a storage's present size, as well as on shapes.
_SIZED_OTHERWISE = frozenset(
    ("resize", "resize_", "resize_as_", "_resize_output_", "set_", "_to_sparse", "to_sparse", "bincount")
)
#: Namespaces whose schemas declare all writes. In other namespaces, all arguments count as written.
_DECLARED = ("aten", "prims", "prim")
#: Operations whose arguments are read after the operation, past the dispatcher: by C++ objects (scales of
#: quantizers, sizes of nested tensors, packed weights), by other streams, or by communication.
_KEEPERS = (
    "per_channel",
    "_nested_tensor",
    "_nested_view_from_buffer",
    "record_stream",
    "_pack",
    "lazy_clone",
)
_KEEPING = ("c10d", "_c10d_functional", "symm_mem", "quantized", "_quantized", "rpc")


def is_compiled() -> bool:
    """Return whether a function passed to `torch.compile` is running, compiled or not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


class OperatorTraits:
    """Traits of one dispatcher operation.

    Attributes:
        function: the operation.
        call: callable that runs the operation, in C++ alone if possible.
        asks: see `Operation`.
        views: see `Operation`; also true of the operation that reads a single number: both are correct on the
            device and on the host copy.
        whole: see `Operation`.
        arguments: see `Operation`.
        effects: undeclared memory effects, or None.
        is_foreach: whether the arguments are lists of tensors, whose bytes alone determine the results'.
        may_pass: whether the operation may skip the mode while nothing moves: the argument shapes determine
            the result size, and the schema declares all memory accesses.
        may_be_followed: whether the operation may skip the mode at its position in a schedule: as `may_pass`,
            except that the operation must write its results, and that marks of the profiler may skip the
            mode.
    """

    __slots__ = (
        "_call", "_is_operator", "arguments", "asks", "effects", "function", "is_foreach", "may_be_followed",
        "may_pass", "views", "whole",
    )  # fmt: skip

    def __init__(self, function: Any, device: str) -> None:
        """Compute the traits of a function on a kind of device such as ``cpu``."""
        operation = operation_of(function)
        self.function = function
        self._is_operator = type(function) is torch._ops.OpOverload
        self._call = function._op if self._is_operator else function
        self.asks, self.whole = operation.asks, operation.whole
        self.views = operation.views or operation.name == "aten::_local_scalar_dense"
        self.arguments: tuple[Argument, ...] = operation.arguments
        self.effects: UndeclaredEffects | None = undeclared_effects(function, operation, device)
        schema = getattr(function, "_schema", None)
        name = operation.name.partition("::")[2].split(".", 1)[0]
        self.is_foreach = name.startswith("_foreach_")
        self.may_pass = (
            (self.effects is None or self.effects.only_leaves_unwritten)
            and operation.name.startswith("aten::")
            and name not in _SIZED_OTHERWISE
            and torch.Tag.dynamic_output_shape not in getattr(function, "tags", ())
            and not (schema is None or any(one.is_out for one in schema.arguments))
            and not is_overridden(operation)
        )
        self.may_be_followed = (self.may_pass and self.effects is None) or _namespace(operation) == "profiler"

    def repeat(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program's operation again without a second entry in profiles."""
        if self._is_operator:
            interposer.leave_out_of_profiles()
        return self._call(*args, **kwargs)

    @property
    def writes(self) -> bool:
        """Return whether the operation may write an argument."""
        return self.whole or any(argument.written for argument in self.arguments)

    def makes_views(self, args: Any) -> bool:
        """Return whether the operation makes views of these arguments: most views of a sparse tensor copy."""
        base = args[0] if self.views and args else None
        if not isinstance(base, torch.Tensor) or base.layout == torch.strided:
            return self.views
        return self.function._schema.name.removeprefix("aten::") in _SHARE_SPARSE


class TraitsRegistry:
    """Traits of the operations seen so far, and classes of tensors that the mode leaves alone.

    Attributes:
        by_id: traits by ``id`` of the operation, which the traits keep alive.
    """

    def __init__(self, device: str) -> None:
        """Start empty, for a kind of device such as ``cpu``."""
        self.by_id: dict[int, OperatorTraits] = {}
        self._device = device
        self._wrappers: dict[Any, bool] = {}
        self._has_warned = False

    def of(self, func: Any) -> OperatorTraits:
        """Return the traits of an operation, from the cache if possible."""
        traits = self.by_id.get(id(func))
        if traits is None:
            if not self._has_warned and is_compiled():
                self._has_warned = True
                log.warning(
                    "torch.compile compiles nothing under a dispatch mode, which swapping is: "
                    "what was to be compiled runs as it is written"
                )
            traits = self.by_id[id(func)] = OperatorTraits(func, self._device)
        return traits

    def skips(self, types: Any) -> bool | None:
        """Classify the tensor classes among an operation's arguments.

        Returns:
            True if a class wraps other tensors, which are dispatched later. False for fake tensors, which
            have no memory, and for functional tensors, which only a tracing mode can unwrap. None if all are
            plain tensors.
        """
        for cls in types:
            if cls is FakeTensor or cls is FunctionalTensor:
                return False
            wraps = self._wrappers.get(cls)
            if wraps is None:
                wraps = self._wrappers[cls] = is_wrapper(cls)
            if wraps:
                return True
        return None


def wraps_memory(args: Any, kwargs: Any) -> bool:
    """Return whether functional tensors that wrap tensors with memory are among the arguments."""
    return any(isinstance(one, FunctionalTensor) and not is_fake(one) for one in tensors_in((args, kwargs)))


def operation_of(func: Any) -> Operation:
    """Return the traits of an operation; outside PyTorch's namespaces, all arguments count as written."""
    operation = learn(func)
    if operation.whole or _namespace(operation) in _DECLARED:
        return operation
    arguments = tuple(argument._replace(written=True) for argument in operation.arguments)
    return dataclasses.replace(operation, arguments=arguments, views=False)


@dataclass(frozen=True)
class UndeclaredEffects:
    """Memory effects of an operation beyond the declared arguments and results.

    Attributes:
        functions: Python functions are among the arguments.
        keys: dispatch keys of a kernel in Python, which may use tensors that are no arguments; None without
            such a kernel.
        retains_tensors: arguments or results are used after the operation, past the dispatcher.
        leaves_unwritten: results are left unwritten.
    """

    functions: bool
    keys: Any
    retains_tensors: bool
    leaves_unwritten: bool

    @property
    def only_leaves_unwritten(self) -> bool:
        """Return whether unwritten results are the only undeclared effect."""
        return self.leaves_unwritten and not (self.functions or self.retains_tensors or self.keys is not None)


def undeclared_effects(func: Any, operation: Operation, device: str) -> UndeclaredEffects | None:
    """Return an operation's undeclared effects on a kind of device; None for most operations."""
    found = UndeclaredEffects(
        operation.whole,
        _python_kernel_keys(operation, device),
        _retains_tensors(func, operation),
        not operation.fills,
    )
    return (
        found
        if found.functions or found.keys is not None or found.retains_tensors or found.leaves_unwritten
        else None
    )


def _retains_tensors(func: Any, operation: Operation) -> bool:
    schema = getattr(func, "_schema", None)
    objects = schema is not None and any(
        isinstance(value.type, torch._C.ClassType) for value in (*schema.arguments, *schema.returns)
    )
    base = operation.name.partition("::")[2]
    return objects or _namespace(operation) in _KEEPING or any(part in base for part in _KEEPERS)


def _python_kernel_keys(operation: Operation, device: str) -> Any:
    if operation.whole or not operation.arguments:
        return None
    name = operation.name.replace("::", "/")
    for key in (device.upper(), "CompositeExplicitAutograd"):
        if f"{name}/{key}" in torch.library._impls:
            return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.upper()))
    return None


def is_overridden(operation: Operation) -> bool:
    """Return whether an operation has a Python kernel for tensors with memory, on any device."""
    name = operation.name.replace("::", "/")
    return any(
        one.startswith(f"{name}/") and not one.startswith((f"{name}/Meta", f"{name}/FuncTorch"))
        for one in torch.library._impls
    )


class NativeOperations:
    """Set of the operations with kernels of PyTorch alone, which may run for an estimate or a second time.

    Kernels of a program or of another library, in Python or C++, may print, count or draw random numbers.
    """

    def __init__(self) -> None:
        self._known: dict[Any, bool] = {}
        self._implementations = 0

    def __contains__(self, func: Any) -> bool:
        if self._implementations != len(torch.library._impls):  # a program registered kernels meanwhile
            self._implementations = len(torch.library._impls)
            self._known.clear()
        native = self._known.get(func)
        if native is None:
            operation = learn(func)
            native = self._known[func] = (
                not operation.whole and _namespace(operation) in _DECLARED and not is_overridden(operation)
            )
        return native


NATIVE = NativeOperations()


def _namespace(operation: Operation) -> str:
    return operation.name.partition("::")[0]
