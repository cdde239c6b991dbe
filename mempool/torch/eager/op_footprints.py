"""Memory footprints of operations: bytes of their results, and of the workspace taken while they run."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mempool.recording.torch.ledger import storages_in, tensors_in
from mempool.torch.eager.operator_traits import NATIVE, PLAIN
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool import _core

#: Operations with large workspaces: until measured, the estimate is the sum of argument and result bytes.
_HUNGRY = ("conv", "rnn", "lstm", "gru", "to_sparse")
#: Workspace estimate for an operation with sparse tensors, as a multiple of argument and result bytes: a
#: conversion from CSR takes 2.7 times as much.
_SPARSE_SHARE = 3
#: Operations that share cuBLAS's workspace, one per thread: 32 MiB on an H100.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear")


class Footprint:
    """Memory footprint of an operation with given shapes, in bytes.

    Attributes:
        result_bytes: bytes of the new storages that the operation returns.
        workspace_bytes: upper bound of the workspace; an estimate until measured.
        samples: number of measurements of the workspace.
        is_guess: whether `result_bytes` is a guess until the first run.
    """

    __slots__ = ("is_guess", "result_bytes", "samples", "workspace_bytes")

    def __init__(self, made: int, room: int = 0, *, is_guess: bool = False) -> None:
        self.result_bytes, self.workspace_bytes, self.samples = made, room, 0
        self.is_guess = is_guess


#: Entry of `OffloadPattern.footprints` that is no operation's.
NO_FOOTPRINT = (None, 0, Footprint(0))


class PoolCounters:
    """Pool counters around one operation, read without disturbing the peaks that others read."""

    def __init__(self, client: _core.Client) -> None:
        """Read the counters of this client's pool."""
        self._client = client
        self._live = self._total = 0

    def begin(self) -> None:
        """Store the counters before an operation."""
        live = self._client.stats()["live"]
        self._live, self._total = live["current"], live["total"]

    def taken_bytes(self) -> int:
        """Return an upper bound of the peak since `begin`, in bytes above the bytes alive at `begin`.

        Two numbers bound the peak, and the smaller counts: the bytes allocated since `begin`, and the
        distance from the bytes alive at `begin` to the pool's all-time peak.
        """
        live: dict[str, int] = self._client.stats()["live"]
        return max(min(live["total"] - self._total, live["peak"] - self._live), 0)

    def kept_bytes(self) -> int:
        """Return the increase of live bytes since `begin`."""
        return max(int(self._client.stats()["live"]["current"]) - self._live, 0)


class OpFootprints:
    """Cache of footprints by operation and shapes.

    The footprint of an operation of PyTorch is computed with tensors without memory. If the result's size
    depends on data, a bound or the largest result seen is used. A kernel of the program or of another library
    must not run for an estimate: the guess for the first run is the largest ratio of result bytes to argument
    bytes seen so far, or 1.
    """

    def __init__(
        self,
        counters: PoolCounters | None = None,
        alignment: int = 1,
        spare_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create an empty cache.

        Args:
            counters: the pool's counters; without a pool, workspaces stay unknown.
            alignment: sizes are rounded up to a multiple of this, bytes.
            spare_bytes: returns the bytes that are free before any eviction.
        """
        self._counters = counters
        self.spare_bytes = spare_bytes
        self._alignment = alignment
        self.cache: dict[Any, Footprint] = {}
        self._largest_result: dict[Any, int] = {}
        self._workspace_share: dict[Any, float] = {}
        self._growth: dict[Any, float] = {}  # largest ratio of result bytes to argument bytes
        self._kept_workspace = 0  # bytes that a product kept when first run in a thread
        self._product_threads: set[int] = set()  # threads that have run a product

    def footprint(self, func: Any, args: Any, kwargs: Any, given: int) -> Footprint:
        """Return the footprint of an operation.

        Args:
            func: the operation.
            args: positional arguments.
            kwargs: keyword arguments.
            given: bytes of the storages among the arguments.
        """
        sized = given == 0  # without tensors, numbers determine the size, as in arange
        try:
            key = (func, _size_key(args, sized), _size_key(kwargs, sized) if kwargs else None)
            need = self.cache.get(key)
        except (AttributeError, RuntimeError, TypeError):  # a nested tensor has no hash or shape
            return Footprint(self._predict_bytes(func, args, kwargs, given)[0] if func in NATIVE else 0)
        if need is None:
            if len(self.cache) >= OPTIONS.max_footprints:
                self.cache.clear()
            if func not in NATIVE:
                guess = int(given * min(self._growth.get(func, 1), OPTIONS.footprint_ample))
                need = self.cache[key] = Footprint(guess, is_guess=True)
                return need
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            sparse = any(tensor.layout is not torch.strided for tensor in tensors)
            modest = self._growth.get(func, math.inf) <= OPTIONS.footprint_ample and not sparse
            modest = modest and len({tensor.shape for tensor in tensors}) <= 1
            ample = modest and 0 < given * OPTIONS.footprint_ample <= self.spare_bytes()
            made, is_guess = (0, False) if ample else self._predict_bytes(func, args, kwargs, given)
            more = 0 if ample else _bound_unpredicted(func, args)
            touched = given + made + (more if func in self._workspace_share else 0)
            workspace = self._estimate_workspace(func, touched, sparse=sparse)
            need = self.cache[key] = Footprint(made + more, workspace, is_guess=is_guess or more > 0)
        if self._kept_workspace and _is_product(func) and threading.get_ident() not in self._product_threads:
            need.workspace_bytes, need.samples = max(need.workspace_bytes, self._kept_workspace), 0
        return need

    def _estimate_workspace(self, func: Any, touched: int, *, sparse: bool) -> int:
        """Estimate the workspace from its ratio to the touched bytes with other shapes."""
        if self._counters is None:
            return 0
        share = self._workspace_share.get(func)
        if sparse:
            share = _SPARSE_SHARE
        elif share is None:
            share = float(any(part in str(func) for part in _HUNGRY))
        return int(share * touched)

    def begin(self) -> None:
        """Begin the measurement of an operation."""
        if self._counters is not None:
            self._counters.begin()

    def end(self, func: Any, need: Footprint, given: int, made: int) -> None:
        """Record the argument and result bytes of an operation, and the workspace if sampled."""
        self._growth[func] = max(self._growth.get(func, 0), made / max(given, 1))
        if made > need.result_bytes or need.is_guess:
            need.is_guess = False
            need.result_bytes = made
            self._largest_result[func] = max(self._largest_result.get(func, 0), made)
        if need.samples < OPTIONS.footprint_samples:
            if self._counters is not None:
                room = max(self._counters.taken_bytes() - made, 0)
                if _is_product(func) and threading.get_ident() not in self._product_threads:
                    self._product_threads.add(threading.get_ident())
                    self._kept_workspace = max(self._kept_workspace, self._counters.kept_bytes() - made)
                need.workspace_bytes = min(need.workspace_bytes, room) if need.samples else room
                self._workspace_share[func] = max(
                    self._workspace_share.get(func, 0), room / max(given + made, 1)
                )
            need.samples += 1

    def _predict_bytes(self, func: Any, args: Any, kwargs: Any, given: int) -> tuple[int, bool]:
        """Return the bytes of an operation's results, and whether the number is a guess."""
        with contextlib.suppress(Exception):  # data-dependent size, no meta kernel, or sparse results
            return self._rounded(_meta_result_sizes(func, args, kwargs)), False
        with contextlib.suppress(Exception):  # no bound, or arguments that the bound does not expect
            return _BOUNDS[func.name().partition(".")[0]](args), False
        largest = self._largest_result.get(func, 0)
        return max(largest, given), largest == 0

    def _rounded(self, sizes: list[int]) -> int:
        unit = self._alignment
        return sum(-(-size // unit) * unit for size in sizes)


def _size_key(value: Any, sized: bool) -> Any:  # noqa: FBT001
    """Return the part of an argument that determines the size of a result; floats count only if ``sized``."""
    kind = type(value)
    if kind in PLAIN and value.layout is torch.strided:
        return value.shape, value.dtype, None if value.is_contiguous() else value.stride()
    if kind is tuple or kind is list:
        return tuple([_size_key(entry, sized) for entry in value])
    if kind is dict:
        return tuple([(name, _size_key(entry, sized)) for name, entry in value.items()])
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype
    if kind is torch.Generator:  # a program may make one for each batch
        return kind
    return kind, None if kind is float and not sized else value


@functools.cache
def _is_product(func: Any) -> bool:
    return func in NATIVE and str(func).split(".")[1] in _PRODUCTS


@functools.cache
def _takes_device(func: Any) -> bool:
    """Return whether an operation has an argument for the device of its result."""
    return any(argument.name == "device" and argument.kwarg_only for argument in func._schema.arguments)


@contextlib.contextmanager
def _hidden_from_profiler() -> Iterator[None]:
    """Hide operations from profiles: they run for an estimate, not for the program."""
    torch.autograd._enable_record_function(False)  # noqa: FBT003
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)  # noqa: FBT003


def _meta_result_sizes(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Return the sizes in bytes of an operation's new storages, computed with meta tensors.

    Raises:
        TypeError: a result is sparse, with a size that depends on data.
    """

    def empty(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.layout is not torch.strided:
            layout = torch.strided if _is_product(func) else value.layout
            return torch.empty(value.shape, dtype=value.dtype, layout=layout, device="meta")
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    with _disable_current_modes(), torch.no_grad(), _hidden_from_profiler():
        args, kwargs = tree_map(empty, (args, kwargs))
        if _takes_device(func):  # otherwise `rand` would draw numbers on the default device
            kwargs = {**kwargs, "device": torch.device("meta")}
        given = {id(storage) for tensor in tensors_in((args, kwargs)) for _, storage in storages_in(tensor)}
        results = func(*args, **kwargs)
        made = {id(storage): storage.nbytes() for _, storage in storages_in(results)}
    if any(result.layout is not torch.strided for result in tensors_in(results)):
        raise TypeError
    return [size for key, size in made.items() if key not in given]


def _nonzero_bound(args: Any) -> int:
    """Bound the result of ``nonzero``: int64[numel, dim]."""
    return int(8 * args[0].numel() * max(args[0].dim(), 1))


def _masked_select_bound(args: Any) -> int:
    """Bound the result of ``masked_select``: every element."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return int(args[0].element_size() * shape.numel())


def _unique_bound(args: Any) -> int:
    """Bound the results of ``unique`` and variants: each element with an index and a count."""
    return int((args[0].element_size() + 16) * args[0].numel())


def _index_bound(args: Any) -> int:
    """Bound the result of ``index`` with masks, or of a sparse tensor made dense: every element."""
    return int(args[0].element_size() * args[0].numel())


def _to_sparse_bound(args: Any) -> int:
    """Bound a dense tensor made sparse: every element with its indices, and compressed rows or columns."""
    shape = (1, 1, *args[0].shape)
    lines = math.prod(shape[:-2]) * (max(shape[-2:]) + 1)
    return int((args[0].element_size() + 8 * args[0].dim()) * args[0].numel() + 8 * lines)


def _bound_unpredicted(func: Any, args: Any) -> int:
    """Bound the sizes of results that PyTorch's shape computation reports as empty.

    On the CPU, a layer of an RNN returns the values that its backward needs: oneDNN 3 takes 15.3 to 16.4
    times the output's bytes and up to 50 KiB, for 7 to 100 steps of 3 to 32 sequences with 24 to 512
    features.
    """
    if func is not torch.ops.aten.mkldnn_rnn_layer.default:
        return 0
    steps, batch = args[0].shape[:2]
    return int(16.5 * steps * batch * args[10] * args[0].element_size()) + (64 << 10)


#: Upper bounds in bytes for operations whose result size depends on data.
_BOUNDS: dict[str, Callable[[Any], int]] = {
    "aten::nonzero": _nonzero_bound,
    "aten::masked_select": _masked_select_bound,
    "aten::_unique": _unique_bound,
    "aten::_unique2": _unique_bound,
    "aten::unique_dim": _unique_bound,
    "aten::unique_consecutive": _unique_bound,
    "aten::unique_dim_consecutive": _unique_bound,
    "aten::index": _index_bound,
    "aten::_to_dense": _index_bound,
    **dict.fromkeys(
        (f"aten::_to_sparse{kind}" for kind in ("", "_csr", "_csc", "_bsr", "_bsc")), _to_sparse_bound
    ),
}
