"""What operations have answered before, told again for tensors of the same kind.

A step does the same few hundred operations some thousand times. FakeTensorMode remembers answers, too, but
takes a hundred microseconds to look one up; here it is some five. Only what is plain is remembered: new
tensors, views of what was given, and what was given itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.fitting.answers import Answer, Given, Made
from mempool.torch.fitting.rules import RULES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._subclasses.fake_tensor import FakeTensorMode

_CPU, _META = torch.device("cpu"), torch.device("meta")
#: Arguments that are the same when they are equal and of one type.
_NUMBERS = frozenset((int, float, bool, complex))
_PLAIN = frozenset((*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
#: What may be told otherwise the next time, or changes what it is given.
_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_TELLS_INDEX = torch.ops.aten.index.Tensor  # of masks it raises, and of indices the shapes tell
#: So many answers are kept at most; then all are forgotten.
MOST = 1 << 15

#: Of tensors: their values are not known, some are; or of arguments, that there is more to them.
_NO_VALUE, _VALUE, _MORE = 1, 2, -1

Key = tuple[Any, ...]


#: By key; None: it is no plain answer. Of the process, as PyTorch's own is.
_ANSWERS: dict[Key, Answer | None] = {}


def can_be(operation: Any) -> bool:
    """Whether what an operation answers is told by the kinds of its arguments."""
    if not isinstance(operation, torch._ops.OpOverload) or not torch._library.utils.is_builtin(operation):
        return False
    return operation is _TELLS_INDEX or _TAGS.isdisjoint(operation.tags)


class Remembered:
    """Answers for the tensors of one mode."""

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
        """Operation and kinds of arguments; None where there is more to them than that."""
        parts = [operation, torch.get_default_dtype()]
        seen = self._describe(args, parts)
        if kwargs and seen >= 0:
            parts.append(tuple(kwargs))
            named = self._describe(kwargs.values(), parts)
            seen = named if named < 0 else seen | named
        if seen < 0 or (seen & _VALUE and (not seen & _NO_VALUE or operation._schema.is_mutable)):
            return None  # a value that is known would be computed with, or be known no more
        return tuple(parts)

    def _describe(self, values: Iterable[Any], parts: list[Any]) -> int:
        """Add what tells of each; say which kinds of tensors there are, or _MORE."""
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
        """What was or would be answered; None: nothing plain; False: it was not asked yet."""
        answer = _ANSWERS.get(key, False)
        if answer is False and (rule := RULES.get(key[0])) is not None:
            found = rule(args, kwargs)
            if found is not None:
                answer = _ANSWERS[key] = found
        return answer

    def told(self, answer: Answer, args: Any) -> Any:
        """The answer once more."""
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
        """A tensor on the meta device as one without memory, as FakeTensor's constructor makes it."""
        made = torch.Tensor._make_subclass(
            FakeTensor,
            meta,
            False,  # noqa: FBT003 - whether it requires a gradient
            dispatch_device=True,
            device_for_backend_keys=_CPU,
        )
        self._guard(made)
        vars(made).update(self._like)
        return made

    def learn(self, key: Key, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Remember what was answered, if it is plain."""
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
        """What a part of an answer is."""
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
    """Whether what would be told is as what was, to the dispatcher's keys."""
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
