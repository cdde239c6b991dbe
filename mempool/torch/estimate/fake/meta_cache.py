"""Cache of meta results: the shapes that operations returned, reused for tensors of the same kind.

A step repeats a few hundred distinct operations some thousand times. A lookup in FakeTensorMode's own cache
takes a hundred microseconds; here about five. The cache holds only plain results: new tensors, views of
arguments, and the arguments themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.fake.meta_results import Answer, Given, Made
from mempool.torch.estimate.fake.shape_rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._subclasses.fake_tensor import FakeTensorMode

_CPU, _META = torch.device("cpu"), torch.device("meta")
#: Types of arguments that are equal if value and type are equal.
_NUMBERS = frozenset((int, float, bool, complex))
_PLAIN = frozenset((*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
#: Tags of operations whose result may differ between calls with equal arguments, or which change an argument.
_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_TELLS_INDEX = torch.ops.aten.index.Tensor  # raises for masks; for indices the shapes determine the result
#: Largest number of cached results; the cache is emptied when this number is reached.
MOST = 1 << 15

#: Flags of `_describe`: some tensors have no known value; some have a known value; an argument cannot be part
#: of a key.
_NO_VALUE, _VALUE, _MORE = 1, 2, -1

Key = tuple[Any, ...]


#: Cached results by key; None: the result is not plain. Global to the process, as PyTorch's own cache is.
_ANSWERS: dict[Key, Answer | None] = {}


def can_be(operation: Any) -> bool:
    """Return whether the kinds of an operation's arguments determine the kind of the result."""
    if not isinstance(operation, torch._ops.OpOverload) or not torch._library.utils.is_builtin(operation):
        return False
    return operation is _TELLS_INDEX or _TAGS.isdisjoint(operation.tags)


class Remembered:
    """Lookups in the cache for the tensors of one fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        unsafe = mode._allow_unsafe_data_ptr_access
        one = FakeTensor(mode, torch.empty(0, device="meta"), _CPU)
        self._like = dict(vars(one))
        pointers = torch._C
        self._guard = (
            pointers._set_warn_deprecated_on_mutable_data_ptr
            if unsafe
            else pointers._set_throw_on_mutable_data_ptr
        )

    def key(self, operation: Any, args: Any, kwargs: Any) -> Key | None:
        """Return the cache key: operation and kinds of arguments; None if the result depends on more."""
        parts = [operation, torch.get_default_dtype()]
        seen = self._describe(args, parts)
        if kwargs and seen >= 0:
            parts.append(tuple(kwargs))
            named = self._describe(kwargs.values(), parts)
            seen = named if named < 0 else seen | named
        if seen < 0 or (seen & _VALUE and (not seen & _NO_VALUE or operation._schema.is_mutable)):
            return None  # the operation would compute with a known value, or make the value unknown
        return tuple(parts)

    def _describe(self, values: Iterable[Any], parts: list[Any]) -> int:
        """Append the description of each argument to `parts`; return the flags of tensors, or _MORE."""
        seen = 0
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if (
                    value.layout is not torch.strided
                    or value.fake_mode is not self._mode
                    or value.fake_device != _CPU
                    or value.dtype.is_complex
                    or value.is_neg()
                ):
                    return _MORE
                seen |= _NO_VALUE if value.constant is None else _VALUE
                parts += (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.storage_offset(),
                    value.requires_grad,
                )
            elif kind in _NUMBERS:
                parts += (kind, value)
            elif kind in _PLAIN:
                parts.append(value)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if (inside := self._describe(value, parts)) < 0:
                    return _MORE
                seen |= inside
            else:
                return _MORE
        return seen

    def answer(self, key: Key, args: Any, kwargs: Any) -> Answer | bool | None:
        """Return the cached or derived result; None if not plain, False if the key is unknown."""
        answer = _ANSWERS.get(key, False)
        if answer is False and (rule := RULES.get(key[0])) is not None:
            found = rule(args, kwargs)
            if found is not None:
                answer = _ANSWERS[key] = found
        return answer

    def told(self, answer: Answer, args: Any) -> Any:
        """Return the result of a cached operation for new arguments."""
        made = [part if part is None else self._part(part, args) for part in answer.parts]
        return made[0] if answer.kind is None else answer.kind(made)

    def _part(self, part: Made | Given, args: Any) -> Any:
        if type(part) is Given:
            return args[part.position]
        of, shape, stride, dtype, offset = part  # type: ignore[misc]
        if of < 0:
            return self.tensor(torch.empty_strided(shape, stride, dtype=dtype, device=_META))
        empty = torch.empty(0, dtype=dtype, device=_META)
        return self.tensor(empty.set_(args[of].untyped_storage(), offset, shape, stride))

    def tensor(self, meta: torch.Tensor) -> FakeTensor:
        """Turn a meta tensor into a fake tensor, as FakeTensor's constructor does."""
        made = torch.Tensor._make_subclass(
            FakeTensor,
            meta,
            False,  # noqa: FBT003 - requires_grad
            dispatch_device=True,
            device_for_backend_keys=_CPU,
        )
        self._guard(made)
        vars(made).update(self._like)
        return made

    def learn(self, key: Key, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Cache the result of an operation, or None if the result is not plain."""
        if len(_ANSWERS) >= MOST:
            _ANSWERS.clear()
        _ANSWERS[key] = None
        kind = next((one for one in (list, tuple) if isinstance(result, one)), None)
        results = [result] if kind is None else result
        parts = [self._seen(one, args, kwargs) for one in results]
        if any(part is _ODD for part in parts) or self.key(operation, args, kwargs) != key:
            return
        new = [one for one, part in zip(results, parts, strict=True) if type(part) is Made and part.of < 0]
        if len({id(one.untyped_storage()) for one in new}) < len(new):
            return
        answer = Answer(kind, tuple(parts))
        again = self.told(answer, args)
        if all(map(_same, results, [again] if kind is None else again)):
            _ANSWERS[key] = answer

    def _seen(self, one: Any, args: Any, kwargs: Any) -> Any:
        """Describe a part of a result: an argument, a new tensor, a view, or `_ODD` if not plain."""
        if one is None:
            return None
        if type(one) is not FakeTensor or one.constant is not None or one.layout is not torch.strided:
            return _ODD
        at = [position for position, value in enumerate(args) if value is one]
        if at:
            return Given(at[0])
        storage = one.untyped_storage()
        there = [
            position
            for position, value in enumerate(args)
            if type(value) is FakeTensor and value.untyped_storage() is storage
        ]
        if not there and any(value.untyped_storage() is storage for value in _deep((args, kwargs))):
            return _ODD
        of = there[0] if there else -1
        return Made(of, tuple(one.shape), one.stride(), one.dtype, one.storage_offset())


_ODD = object()


def _deep(values: Any) -> list[FakeTensor]:
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, FakeTensor)]


def _same(one: Any, other: Any) -> bool:
    """Return whether a tensor made from the cache equals the real result, including the dispatch keys."""
    if one is None or one is other:
        return one is other
    keys = torch._C._dispatch_key_set
    return (
        one.storage_offset() == other.storage_offset()
        and one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        and not one.requires_grad
        and not one.is_neg()
        and not one.is_conj()
        and one.fake_device == _CPU
        and bool(keys(one) == keys(other))
    )
