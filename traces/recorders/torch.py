"""What PyTorch's operations allocate, read, write and let go, real tensors or fake ones."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from traces.trace import Kind, Trace

#: Names of the marks of what begins in a training step, in the order of their kind.
PHASES = ("forward", "backward", "optimizer")


class AccessRecorder(TorchDispatchMode):
    """Records one trace while its ``with`` block runs.

        with AccessRecorder() as recorder:
            recorder.own("parameter", model.parameters())
            loss = model(x).sum()
            ...
        trace = recorder.trace()

    A storage is a buffer. An operation is an event of each storage that it reads or writes, by its schema;
    views touch nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._names: dict[str, int] = {}
        self._ids: dict[int, int] = {}  # of the living storages, by their address
        self._refs: dict[int, Any] = {}
        self._category: dict[int, str] = {}
        self._count = 0

    def own(self, category: str, tensors: Any) -> None:
        """Say what the storages of some tensors are to the program."""
        for tensor in tensors:
            self._category[self._id(tensor.untyped_storage(), "")] = category

    def mark(self, name: str) -> None:
        """Say that a phase or an iteration begins: "forward", "backward", "optimizer", or "step"."""
        self._row(Kind.MARK, -1, 0, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        before = self._count
        written: set[int] = set()
        for given, said in zip(args, func._schema.arguments, strict=False):
            if said.alias_info is not None and said.alias_info.is_write:
                written.update(id(t) for t in tree_iter(given))
        made = [self._id(t.untyped_storage(), name) for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        if self._count == before and not written:
            return result  # a view
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                kind = Kind.WRITE if id(tensor) in written else Kind.READ
                self._row(kind, self._id(tensor.untyped_storage(), name), 0, name)
        for buffer in made:
            if buffer >= before:
                self._row(Kind.WRITE, buffer, 0, name)
        return result

    def _row(self, kind: Kind, buffer: int, size: int, name: str) -> None:
        operation = self._names.setdefault(name, len(self._names)) if name else -1
        self._rows.append((kind, buffer, size, time.perf_counter_ns(), operation, -1))

    def _id(self, storage: Any, operation: str) -> int:
        key = storage._cdata
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = self._count
            self._count += 1
            self._row(Kind.ALLOC, found, storage.nbytes(), operation)
            self._refs[key] = weakref.ref(storage, lambda _: self._free(key))
        return found

    def _free(self, key: int) -> None:
        self._row(Kind.FREE, self._ids.pop(key), 0, "")
        del self._refs[key]

    def trace(self) -> Trace:
        """What was recorded."""
        kind, buffer, size, time_ns, operation, module = zip(*self._rows, strict=True)
        category = [
            self._names.setdefault(self._category[b], len(self._names))
            if k == Kind.ALLOC and b in self._category
            else -1
            for k, b in zip(kind, buffer, strict=True)
        ]
        return Trace.of(
            [int(k) for k in kind],
            buffer,
            size,
            time_ns=time_ns,
            operation=operation,
            module=module,
            category=category,
            names=tuple(self._names),
            metadata={"framework": "pytorch", "alignment": "512"},
        )
