"""Library in front of PyTorch's dispatcher, which sees every operation of every thread (``interposer.cpp``).

A dispatch mode misses operations of threads that the program starts, operations that run while modes are
disabled, and composite operations as a whole. The library reloads the arguments of such operations and pins
them while the operation runs: it *lends* them. A storage without device memory points to its host copy until
the storage is reloaded, so code below the dispatcher, such as a C library with an address, finds the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mempool.errors import UsageError
from mempool.torch.compiled_library import Source
from mempool.torch.offload.hidden import hidden_from_program
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.torch.eager.mode import OffloadMode
    from mempool.torch.eager.schedule_follower import ScheduleFollower

SOURCE = Source(
    Path(__file__).with_name("interposer.cpp"),
    ("c10", "torch_cpu"),
    "mempool_interposer_install",
    headers=("operations.hpp", "bypass.hpp", "entries.hpp", "follower.hpp", "moves.hpp"),
)
#: The installed modes, by kind of device.
_modes: dict[str, weakref.ref[OffloadMode]] = {}
#: The follower of the present schedule.
_followers: list[weakref.ref[ScheduleFollower]] = []
#: Storages of the present lends, by number of the lend.
_lent: dict[int, list[tuple[Any, Any, bool, bool]]] = {}
_numbers = itertools.count()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library, built and loaded on first use.

    Raises:
        UsageError: the library cannot be built or loaded.
    """
    loaded = SOURCE.load()  # never unloaded: PyTorch's dispatcher calls it
    try:
        torch.ops.load_library(loaded._name)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"PyTorch does not take the interposer: {error}") from None
    pointer, text, small, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
    for name, arguments in {
        "mempool_interposer_install": [pointer, small],
        "mempool_interposer_remove": [pointer],
        "mempool_interposer_park": [pointer, pointer, size],
        "mempool_interposer_set_kind": [small],
        "mempool_interposer_allocator": [pointer],
        "mempool_interposer_land": [pointer, pointer, size],
        "mempool_standby_begin": [pointer],
        "mempool_standby_end": [pointer],
        "mempool_bypass_lacks": [size, size],
        "mempool_bypass_open": [pointer, small, *[pointer] * 3, size],
        "mempool_bypass_learn": [text, text, small, small, size],
        "mempool_interposer_learn_view": [text, text],
        "mempool_interposer_watch": [pointer],
        "mempool_interposer_watches": [pointer],
        "mempool_entries_begin": [pointer, small, size],
        "mempool_entries_learn": [text, text],
        "mempool_follower_free": [pointer],
        "mempool_follower_learn": [pointer, size, text, text, size],
        "mempool_follower_set_actions": [pointer, text, size],
        "mempool_follower_set_moves": [pointer, pointer, size],
        "mempool_moves_begin": [size, *[pointer] * 6, *[size] * 4, pointer, size],
        "mempool_moves_bind": [size, pointer, small, size, size],
        "mempool_moves_counts": [pointer],
        "mempool_follower_await": [pointer, small],
        "mempool_follower_start": [
            pointer,
            size,
            small,
            pointer,
            small,
            *[pointer] * 4,
            size,
            small,
            size,
            size,
        ],
        "mempool_follower_advance": [size],
        "mempool_follower_born": [pointer],
    }.items():
        getattr(loaded, name).argtypes = arguments
    loaded.mempool_interposer_writes.restype = ctypes.POINTER(ctypes.c_uint64)
    for name in ("remove", "learn_view", "watch", "repeat"):
        getattr(loaded, f"mempool_interposer_{name}").restype = None
    loaded.mempool_interposer_allocator.restype = pointer
    loaded.mempool_interposer_copy_writes.restype = ctypes.c_uint64
    loaded.mempool_bypass_count.restype = loaded.mempool_follower_count.restype = ctypes.c_uint64
    loaded.mempool_follower_table.restype = pointer
    loaded.mempool_standby_wake.restype = loaded.mempool_standby_end.restype = None
    loaded.mempool_entries_begin.restype = loaded.mempool_entries_learn.restype = None
    loaded.mempool_entries_accessed.restype = size
    for name in ("position", "born", "made", "older"):
        getattr(loaded, f"mempool_follower_{name}").restype = size
    for name in ("free", "set_actions", "set_moves", "advance", "end_iteration", "stop"):
        getattr(loaded, f"mempool_follower_{name}").restype = None
    for name in ("begin", "bind", "counts"):
        getattr(loaded, f"mempool_moves_{name}").restype = None
    _functions.impl("lend", lend, "CPU")
    _functions.impl("give_back", give_back, "CPU")
    _functions.impl("reload", _reload, "CPU")
    _functions.impl("make_room", _make_room, "CPU")
    _functions.impl("before", lambda absent, at: _follower().before(absent, at), "CPU")
    _functions.impl("after", lambda results, at: _follower().after(results, at), "CPU")
    _tell_higher_order(torch._C._dispatch_key_parse("DeferredInit"))
    return loaded


_functions = torch.library.Library("mempool_interposer", "IMPL")


def install(mode: OffloadMode) -> None:
    """Start lending arguments to the operations that the mode does not see.

    Raises:
        UsageError: another mode offloads storages of this kind of device, or the library cannot be built.
    """
    device = mode.storages.device
    if not library().mempool_interposer_install(id(mode), device == "cuda"):
        raise UsageError(f"a limit is set already for this process's tensors on {device}")
    _modes[device] = weakref.ref(mode)


def remove(mode: OffloadMode) -> None:
    """Undo `install`, in the same thread."""
    library().mempool_interposer_remove(id(mode))


def unseen_writes() -> ctypes.c_uint64:
    """Return the count of unseen operations without a lend that may have written a storage."""
    count: ctypes.c_uint64 = library().mempool_interposer_writes().contents
    return count


def copy_writes() -> int:
    """Return the count of operations without a lend that may have written host copies."""
    return int(library().mempool_interposer_copy_writes())


def learn_view(function: Any) -> None:
    """Let later calls of this function skip the mode: the function makes views, or reads a number."""
    schema = function._schema
    library().mempool_interposer_learn_view(schema.name.encode(), schema.overload_name.encode())


def leave_out_of_profiles() -> None:
    """Hide this thread's next operation from profiles, but not the operations that it calls."""
    library().mempool_interposer_repeat()


def begin_entries(mode: OffloadMode) -> None:
    """Begin an iteration of this thread: forget the repeated operations on single entries."""
    library().mempool_entries_begin(id(mode), mode.storages.device == "cuda", OPTIONS.min_storage_bytes)


def learn_entry(function: Any) -> None:
    """Let repetitions of the operation that the mode has just run skip the mode on single entries."""
    if (schema := getattr(function, "_schema", None)) is not None:
        library().mempool_entries_learn(schema.name.encode(), schema.overload_name.encode())


def accessed_by_entries() -> list[tuple[torch.Tensor, bool]]:
    """Return the storages that loops over single entries accessed since the last call.

    Returns:
        uint8[n] of each storage, and whether the storage was written.
    """
    if not library().mempool_entries_accessed():
        return []
    with own_operations(), hidden_from_program():
        tensors, written = torch.ops.mempool_interposer.accessed()
    return [(tensor, bool(wrote)) for tensor, wrote in zip(tensors, written, strict=True)]


def watch(storage: Any) -> None:
    """Register a storage that has a valid copy on the host."""
    library().mempool_interposer_watch(storage._cdata)


def is_watched(storage: Any) -> bool:
    """Return whether no unseen operation has written the storage since `watch`."""
    return bool(library().mempool_interposer_watches(storage._cdata))


def park(storage: Any, address: int, writes: int) -> bool:
    """Free the device memory of a storage, and let the storage point to `address` on the host.

    Args:
        storage: the storage.
        address: the address of the host copy.
        writes: count of unseen writes when the copy was last known to be valid.

    Returns:
        False, with nothing freed, if the memory may be in use now or the copy may be stale.
    """
    return bool(library().mempool_interposer_park(storage._cdata, address, writes))


def landing_for(storage: Any, size: int) -> Any:
    """Return a new storage of `size` bytes, of the same device and kind of memory.

    Raises:
        torch.OutOfMemoryError: the device has no memory.
    """
    return torch.UntypedStorage(size, allocator=library().mempool_interposer_allocator(storage._cdata))


def land(storage: Any, landing: Any, writes: int) -> bool:
    """Move a parked storage into the memory of the storage `landing`; ignore storages that are not parked.

    Returns:
        False, with the storage still parked, if the host copy may have been written since `copy_writes`
        returned `writes`.
    """
    return bool(library().mempool_interposer_land(storage._cdata, landing._cdata, writes))


@contextlib.contextmanager
def own_operations() -> Iterator[None]:
    """Hide the offloading's own operations from the interposer."""
    set_operation_kind = library().mempool_interposer_set_kind
    before = set_operation_kind(1)
    try:
        yield
    finally:
        set_operation_kind(before)


def set_follower(follower: ScheduleFollower) -> None:
    """Set the follower of the present schedule."""
    _followers[:] = [weakref.ref(follower)]


def _follower() -> ScheduleFollower:
    if (found := _followers[0]()) is None:
        raise RuntimeError("the offloading has ended")
    return found


def _reload(absent: list[torch.Tensor]) -> None:
    """Reload storages for an operation outside all modes."""
    if (found := _modes.get(absent[0].device.type)) is not None and (mode := found()) is not None:
        mode.reload(absent)


def _make_room(cuda: bool) -> None:  # noqa: FBT001
    """Make room after results of operations outside all modes."""
    if (found := _modes.get("cuda" if cuda else "cpu")) is not None and (mode := found()) is not None:
        mode.operations.admit(0, [])


def lend(tensors: list[torch.Tensor], operation: str, writes: bool) -> int:  # noqa: FBT001
    """Reload and pin the storages of these tensors until `give_back`; return the lend's number.

    The lends are not thread-local data: Python forgets a foreign thread's data after each call.
    """
    given: list[tuple[Any, Any, bool, bool]] = []
    try:
        for tensor in tensors:
            if (found := _modes.get(tensor.device.type)) is not None and (mode := found()) is not None:
                mode.lend(tensor, operation, writes, given)
    except BaseException:
        _return(given)
        raise
    number = next(_numbers)
    _lent[number] = given
    return number


def give_back(number: int) -> None:
    """Unpin the storages of a lend."""
    _return(_lent.pop(number))


def _return(given: list[tuple[Any, Any, bool, bool]]) -> None:
    for mode, record, away, writes in given:
        mode.transfers.give_back(record, away=away, wrote=writes)


def _tell_higher_order(key: Any) -> None:
    """Register a fallthrough of the library's dispatch key for Python's higher-order operations."""
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for one in torch._ops._higher_order_ops.values():
        one.fallthrough(key)
