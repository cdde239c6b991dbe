"""How much room an operation needs for what it makes."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from traces.recorders.torch.storages import tensors_in


class Needs:
    """Bytes by operation and the shapes it is given: asked of tensors without memory, then as they were."""

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}

    def _key(self, func: Any, args: Any) -> Any:
        return func, tuple([
            (tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor)
            else tuple([tuple(t.shape) for t in tensors_in(a)]) if isinstance(a, (list, tuple))
            else a
            for a in args
        ])  # fmt: skip

    def of(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes that an operation will make."""
        try:
            key = self._key(func, args)
            found = self._known.get(key)
        except TypeError:
            return 0
        if found is None:
            found = self._known[key] = self._asked(func, args, kwargs)
        return found

    def learn(self, func: Any, args: Any, made: int) -> None:
        """What it has made."""

    @staticmethod
    def _asked(func: Any, args: Any, kwargs: Any) -> int:
        try:
            mode = FakeTensorMode()

            def fake(value: Any) -> Any:
                return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

            args, kwargs = torch.utils._pytree.tree_map(fake, (args, kwargs))
            before = {id(t.untyped_storage()) for t in tensors_in((args, kwargs))}
            with mode:
                result = func(*args, **kwargs)
            made = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors_in(result)}
            return sum(size for key, size in made.items() if key not in before)
        except Exception:  # data decide, or it has no such rule
            return 0
