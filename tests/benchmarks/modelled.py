"""Traces of training steps on fake tensors, whose clock is a roofline: operations and bytes touched."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from traces import Kind, Trace

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Profile:
    """What a device does in a second; an operation takes the longer of its two times."""

    flops: float
    bandwidth: float


class ModelledRecorder(TorchDispatchMode):
    """Allocs, frees and accesses of all operations; `time_ns` is that of the profile."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._names: dict[str, int] = {}
        self._ids: dict[int, int] = {}
        self._refs: dict[int, Any] = {}
        self._now = 0.0

    def mark(self, name: str) -> None:
        self._row(Kind.MARK, -1, 0, name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.name()
        written = set()
        for given, said in zip(args, func._schema.arguments, strict=False):
            if said.alias_info is not None and said.alias_info.is_write:
                written.update(id(t) for t in tree_iter(given))
        before = len(self._ids), self._count
        made = [self._id(t, name) for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        if self._count == before[1] and not written:
            return result  # a view
        touched: dict[int, tuple[bool, int]] = {}
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                buffer = self._id(tensor, name)
                writes = id(tensor) in written or touched.get(buffer, (False, 0))[0]
                touched[buffer] = writes, tensor.untyped_storage().nbytes()
        for tensor, buffer in zip(
            (t for t in tree_iter(result) if isinstance(t, torch.Tensor)), made, strict=True
        ):
            if buffer >= before[1]:
                touched[buffer] = True, tensor.untyped_storage().nbytes()
        for buffer, (writes, _) in touched.items():
            self._row(Kind.WRITE if writes else Kind.READ, buffer, 0, name)
        of_flops = 0.0
        if (counts := flop_registry.get(func.overloadpacket)) is not None:
            of_flops = counts(*args, **kwargs, out_val=result) / self._profile.flops
        # In place, what is written is read before.
        moved = sum(size * (2 if writes and b < before[1] else 1) for b, (writes, size) in touched.items())
        self._now += max(of_flops, moved / self._profile.bandwidth)
        return result

    @property
    def _count(self) -> int:
        return self._made

    _made = 0

    def _row(self, kind: Kind, buffer: int, size: int, name: str) -> None:
        operation = self._names.setdefault(name, len(self._names)) if name else -1
        self._rows.append((kind, buffer, size, round(self._now * 1e9), operation))

    def _id(self, tensor: Any, operation: str) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = self._made
            self._made += 1
            self._row(Kind.ALLOC, found, storage.nbytes(), operation)
            self._refs[key] = weakref.ref(storage, lambda _: self._free(key))
        return found

    def _free(self, key: int) -> None:
        self._row(Kind.FREE, self._ids.pop(key), 0, "")
        del self._refs[key]

    def trace(self) -> Trace:
        kind, buffer, size, time_ns, operation = zip(*self._rows, strict=True)
        return Trace.of(
            [int(k) for k in kind],
            buffer,
            size,
            time_ns=time_ns,
            operation=operation,
            names=tuple(self._names),
            metadata={"framework": "pytorch", "alignment": "512", "time": "operation"},
        )


def training_trace(
    model: Callable[[], torch.nn.Module],
    shape: tuple[int, ...],
    profile: Profile,
    *,
    classes: int = 10,
    momentum: float = 0.9,
    steps: int = 4,
) -> Trace:
    """SGD with momentum, gradients set to none after the update; the batch is made anew for each step."""
    with FakeTensorMode():
        net = model()
        optimizer = torch.optim.SGD(
            net.parameters(), lr=0.1, momentum=momentum, weight_decay=5e-4, foreach=False
        )
        recorder = ModelledRecorder(profile)
        with recorder:
            for _ in range(steps):
                recorder.mark("step")
                x = torch.empty(shape)
                y = torch.empty(shape[0], dtype=torch.int64)
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                del x, y, loss
            recorder.mark("step")
        return recorder.trace()
