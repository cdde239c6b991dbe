"""What operations read and write, found the slow way, for comparison: it keeps every storage alive."""

from __future__ import annotations

from typing import Any

import torch
from recorded import accesses
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from traces import Trace

Accesses = list[tuple[str, tuple[int, ...], tuple[int, ...]]]


class SlowRecorder(TorchDispatchMode):
    """Its ``accesses`` are of each operation that touches anything: name, sizes read, sizes written."""

    def __init__(self) -> None:
        super().__init__()
        self.accesses: Accesses = []
        self._kept: dict[int, Any] = {}

    def _storages(self, values: Any) -> dict[int, int]:
        found = {}
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._kept[id(storage)] = storage
                found[id(storage)] = storage.nbytes()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._storages((args, kwargs))
        result = func(*args, **kwargs)
        by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = self._storages(
            [
                by_name.get(argument.name)
                for argument in func._schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        )
        if torch.Tag.inplace_view in func.tags:
            return result
        out = self._storages(result)
        made = {key: size for key, size in out.items() if key not in before}
        if out and not made and not written:
            return result
        name = func.name()
        if name.startswith("prim::"):
            return result
        base = name.split(".")[0]
        asks_for_the_shape = base.endswith("_like") or base.startswith("aten::new_")
        read = {} if asks_for_the_shape else {key: size for key, size in before.items() if key not in written}
        written |= {} if "empty" in base else made
        if read or written:
            self.accesses.append((name, tuple(sorted(read.values())), tuple(sorted(written.values()))))
        return result

    @staticmethod
    def of(trace: Trace) -> Accesses:
        """The same of a trace whose operations have a time each."""
        rows = accesses(trace)
        times = trace.time_ns[(trace.kind == 2) | (trace.kind == 3)].tolist()
        grouped: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        for time, (kind, operation, size) in zip(times, rows, strict=True):
            grouped.setdefault((time, operation or ""), ([], []))[kind == "WRITE"].append(size)
        return [(name, tuple(sorted(r)), tuple(sorted(w))) for (_, name), (r, w) in grouped.items()]
