"""Meta results of operations: from shape rules, or from a cache of PyTorch's own results.

A step repeats a few hundred distinct operations some thousand times. A lookup in FakeTensorMode's own cache
takes a hundred microseconds; here about five. For each new combination of sizes PyTorch needs a millisecond,
often by decomposing the operation. The shape rules cover only dense tensors of one type, as most networks
have; for all other arguments a rule returns None, and PyTorch computes the result. The cache holds only plain
results: new tensors, views of arguments, and the arguments themselves.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode


class NewTensor(NamedTuple):
    """A new tensor, or, if ``of`` is not negative, a view of the argument at that position."""

    of: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0


class Argument(NamedTuple):
    """The argument at a position, itself."""

    position: int


class MetaResult(NamedTuple):
    """Parts of a result, in a list or tuple (``kind``); a single part if ``kind`` is None."""

    kind: type | None
    parts: tuple[NewTensor | Argument | None, ...]


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; a dimension of size zero counts as one."""
    return tuple(math.prod(max(1, size) for size in shape[at + 1 :]) for at in range(len(shape)))


def new(shape: Sequence[int], dtype: torch.dtype) -> NewTensor:
    """Describe a new contiguous tensor."""
    return NewTensor(-1, tuple(shape), dense(shape), dtype)


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> NewTensor:
    """Describe a new tensor of the same sizes and strides."""
    return NewTensor(-1, tuple(tensor.shape), tensor.stride(), dtype or tensor.dtype)


def single(part: NewTensor | Argument) -> MetaResult:
    """Return a result of one part."""
    return MetaResult(None, (part,))


_aten = torch.ops.aten


def _is_dense(*tensors: Any) -> bool:
    """Return whether all are contiguous, non-empty floating-point tensors of one type."""
    return all(
        type(t) is FakeTensor
        and t.dtype.is_floating_point
        and t.dtype is tensors[0].dtype
        and 0 not in t.shape
        and t.is_contiguous()
        for t in tensors
    )


def _pointwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    """Return the result of a pointwise operation on tensors of one shape, and numbers."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not tensors or not _is_dense(*tensors) or {len(t.shape) for t in tensors} == {0}:
        return None
    if any(t.shape != tensors[0].shape for t in tensors):
        return None
    plain = all(isinstance(value, (torch.Tensor, int, float, str)) for value in (*args, *kwargs.values()))
    return single(new(tensors[0].shape, tensors[0].dtype)) if plain else None


def _same_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    (x,) = args
    return None if kwargs else single(NewTensor(0, tuple(x.shape), x.stride(), x.dtype, x.storage_offset()))


def _view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    x, size = args
    if kwargs or 0 in x.shape or not x.is_contiguous() or size.count(-1) > 1:
        return None
    known = math.prod(s for s in size if s != -1)
    if known <= 0 or x.numel() % known or (-1 not in size and x.numel() != known):
        return None
    shape = tuple(x.numel() // known if s == -1 else s for s in size)
    return single(NewTensor(0, shape, dense(shape), x.dtype, x.storage_offset()))


def _transpose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    x, *dims = args
    if kwargs or (not dims and x.dim() != 2) or x.dim() < 2:
        return None
    left, right = dims or (0, 1)
    if not all(-x.dim() <= dim < x.dim() for dim in (left, right)):
        return None
    shape, stride = list(x.shape), list(x.stride())
    for values in (shape, stride):
        values[left], values[right] = values[right], values[left]
    return single(NewTensor(0, tuple(shape), tuple(stride), x.dtype, x.storage_offset()))


def _product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    """Return the result of a matrix product, with a vector added for addmm."""
    *added, left, right = args
    dtypes = {t.dtype for t in args}
    if kwargs or len(dtypes) > 1 or not left.dtype.is_floating_point:
        return None
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
        return None
    shape = (left.shape[0], right.shape[1])
    usual = all(t.dim() == 1 and t.shape[0] == shape[1] for t in added)
    return single(new(shape, left.dtype)) if usual and 0 not in (*left.shape, *right.shape) else None


#: Values of the arguments of `empty_like` and similar operations for which the rule holds.
_USUAL = {
    "memory_format": (None, torch.preserve_format),
    "device": (None, torch.device("cpu")),
    "layout": (None, torch.strided),
    "pin_memory": (None, False),
}


def _like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    (x,) = args
    usual = _is_dense(x) and all(kwargs[name] in _USUAL[name] for name in kwargs if name != "dtype")
    return single(new(x.shape, kwargs.get("dtype") or x.dtype)) if usual else None


def _batch_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    x, weight, bias, mean, var, training, _, _ = args
    if kwargs or not _is_norm(x, weight, bias, mean, var) or (not training and None in (mean, var)):
        return None
    channels = new([x.shape[1] if training else 0], x.dtype)
    return MetaResult(tuple, (like(x), channels, channels))


def _batch_norm_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    gradient, x, weight, mean, var, save_mean, save_invstd, training, _, mask = args
    used = (save_mean, save_invstd) if training else (mean, var)
    if kwargs or None in used or not _is_norm(x, weight, *used) or not _is_norm(gradient):
        return None
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        return None
    channels = new([x.shape[1]], (x if weight is None else weight).dtype)
    return MetaResult(tuple, (like(x), *(channels if needed else None for needed in mask[1:])))


def _is_norm(x: Any, *channels: Any) -> bool:
    """Return whether x is dense with several values per channel, and the others are channel vectors."""
    return (
        _is_dense(x)
        and x.dim() >= 2
        and x.numel() > x.shape[1]
        and all(v is None or (v.dim() == 1 and v.shape[0] == x.shape[1]) for v in channels)
    )


def _layer_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    x, shape, weight, bias, _ = args
    last = list(shape)
    usual = x.dtype is torch.float32 and _is_dense(*(t for t in (x, weight, bias) if t is not None))
    if kwargs or not usual or not last or list(x.shape[-len(last) :]) != last:
        return None
    if any(t is not None and list(t.shape) != last for t in (weight, bias)):
        return None
    rows = new((*x.shape[: -len(last)], *(1 for _ in last)), x.dtype)
    return MetaResult(tuple, (new(x.shape, x.dtype), rows, rows))


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    x, p, train = args
    if kwargs or not _is_dense(x) or not x.dim() or not train or not 0 < p < 1:
        return None
    return MetaResult(tuple, (new(x.shape, x.dtype), new(x.shape, torch.bool)))


def _foreach(args: tuple[Any, ...], kwargs: dict[str, Any]) -> MetaResult | None:
    """Return the result of a foreach operation on lists of tensors, element by element, and numbers."""
    lists = [value for value in args if isinstance(value, (list, tuple))]
    numbers = (*(value for value in args if not isinstance(value, (list, tuple))), *kwargs.values())
    if not lists or not lists[0] or not all(isinstance(value, (int, float)) for value in numbers):
        return None
    if any(len(value) != len(lists[0]) for value in lists):
        return None
    answers = [_pointwise(parts, {}) for parts in zip(*lists, strict=True)]
    if any(lookup is None for lookup in answers):
        return None
    return MetaResult(list, tuple(lookup.parts[0] for lookup in answers if lookup is not None))


#: Pointwise operations on tensors and numbers whose result has the tensors' type.
_POINTWISE = """
    relu threshold_backward gelu gelu_backward silu silu_backward tanh tanh_backward sigmoid sigmoid_backward
    exp neg rsqrt sqrt add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar div.Scalar pow.Tensor_Scalar
    add.Scalar sub.Scalar
"""
_FOREACH = (
    "sqrt neg reciprocal add.Scalar sub.Scalar mul.Scalar div.Scalar add.List sub.List mul.List div.List"
)
RULES: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], MetaResult | None]] = {
    **{
        getattr(getattr(_aten, packet), overload or "default"): _pointwise
        for packet, _, overload in (name.partition(".") for name in _POINTWISE.split())
    },
    **{
        getattr(getattr(_aten, f"_foreach_{packet}"), overload or "default"): _foreach
        for packet, _, overload in (name.partition(".") for name in _FOREACH.split())
    },
    _aten.detach.default: _same_view,
    _aten.alias.default: _same_view,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.t.default: _transpose,
    _aten.transpose.int: _transpose,
    _aten.mm.default: _product,
    _aten.addmm.default: _product,
    _aten.empty_like.default: _like,
    _aten.zeros_like.default: _like,
    _aten.ones_like.default: _like,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_dropout.default: _dropout,
}


_CPU, _META = torch.device("cpu"), torch.device("meta")
#: Types of arguments that are equal if value and type are equal.
_NUMBERS = frozenset((int, float, bool, complex))
_PLAIN = frozenset((*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
#: Tags of operations whose result may differ between calls with equal arguments, or which change an argument.
_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))
_TELLS_INDEX = torch.ops.aten.index.Tensor  # raises for masks; for indices the shapes determine the result

#: Flags of `_describe`: some tensors have no known value; some have a known value; an argument cannot be part
#: of a key.
_NO_VALUE, _VALUE, _NO_KEY = 1, 2, -1

Key = tuple[Any, ...]


#: Cached results by key; None: the result is not plain. Global to the process, as PyTorch's own cache is.
CACHE: dict[Key, MetaResult | None] = {}


def is_cacheable(operation: Any) -> bool:
    """Return whether the kinds of an operation's arguments determine the kind of the result."""
    if not isinstance(operation, torch._ops.OpOverload) or not torch._library.utils.is_builtin(operation):
        return False
    return operation is _TELLS_INDEX or _TAGS.isdisjoint(operation.tags)


class MetaCache:
    """Lookups in the cache for the tensors of one fake mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        unsafe = mode._allow_unsafe_data_ptr_access
        sample = FakeTensor(mode, torch.empty(0, device="meta"), _CPU)
        self._like = dict(vars(sample))
        pointers = torch._C
        self._guard = (
            pointers._set_warn_deprecated_on_mutable_data_ptr
            if unsafe
            else pointers._set_throw_on_mutable_data_ptr
        )

    def key(self, operation: Any, args: Any, kwargs: Any) -> Key | None:
        """Return the cache key: operation and kinds of arguments; None if the result depends on more."""
        parts = [operation, torch.get_default_dtype()]
        flags = self._describe(args, parts)
        if kwargs and flags >= 0:
            parts.append(tuple(kwargs))
            named_flags = self._describe(kwargs.values(), parts)
            flags = named_flags if named_flags < 0 else flags | named_flags
        if flags < 0 or (flags & _VALUE and (not flags & _NO_VALUE or operation._schema.is_mutable)):
            return None  # the operation would compute with a known value, or make the value unknown
        return tuple(parts)

    def _describe(self, values: Iterable[Any], parts: list[Any]) -> int:
        """Append the description of each argument to `parts`; return the flags of tensors, or _MORE."""
        flags = 0
        for value in values:
            type_ = type(value)
            if type_ is FakeTensor:
                if (
                    value.layout is not torch.strided
                    or value.fake_mode is not self._mode
                    or value.fake_device != _CPU
                    or value.dtype.is_complex
                    or value.is_neg()
                ):
                    return _NO_KEY
                flags |= _NO_VALUE if value.constant is None else _VALUE
                parts += (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    value.storage_offset(),
                    value.requires_grad,
                )
            elif type_ in _NUMBERS:
                parts += (type_, value)
            elif type_ in _PLAIN:
                parts.append(value)
            elif type_ is list or type_ is tuple:
                parts += (type_, len(value))
                if (inner := self._describe(value, parts)) < 0:
                    return _NO_KEY
                flags |= inner
            else:
                return _NO_KEY
        return flags

    def lookup(self, key: Key, args: Any, kwargs: Any) -> MetaResult | bool | None:
        """Return the cached or derived result; None if not plain, False if the key is unknown."""
        lookup = CACHE.get(key, False)
        if lookup is False and (rule := RULES.get(key[0])) is not None:
            found = rule(args, kwargs)
            if found is not None:
                lookup = CACHE[key] = found
        return lookup

    def materialize(self, lookup: MetaResult, args: Any) -> Any:
        """Return the result of a cached operation for new arguments."""
        made = [part if part is None else self._part(part, args) for part in lookup.parts]
        return made[0] if lookup.kind is None else lookup.kind(made)

    def _part(self, part: NewTensor | Argument, args: Any) -> Any:
        if type(part) is Argument:
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

    def store(self, key: Key, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Cache the result of an operation, or None if the result is not plain."""
        if len(CACHE) >= OPTIONS.meta_results:
            CACHE.clear()
        CACHE[key] = None
        container = next((part_ for part_ in (list, tuple) if isinstance(result, part_)), None)
        results = [result] if container is None else result
        parts = [self._describe_part(part_, args, kwargs) for part_ in results]
        if any(part is _NOT_PLAIN for part in parts) or self.key(operation, args, kwargs) != key:
            return
        new = [
            part_
            for part_, part in zip(results, parts, strict=True)
            if type(part) is NewTensor and part.of < 0
        ]
        if len({id(part_.untyped_storage()) for part_ in new}) < len(new):
            return
        meta_result = MetaResult(container, tuple(parts))
        repeated = self.materialize(meta_result, args)
        if all(map(_equals, results, [repeated] if container is None else repeated)):
            CACHE[key] = meta_result

    def _describe_part(self, part: Any, args: Any, kwargs: Any) -> Any:
        """Describe a part of a result: an argument, a new tensor, a view, or `_NOT_PLAIN` if not plain."""
        if part is None:
            return None
        if type(part) is not FakeTensor or part.constant is not None or part.layout is not torch.strided:
            return _NOT_PLAIN
        positions = [position for position, value in enumerate(args) if value is part]
        if positions:
            return Argument(positions[0])
        storage = part.untyped_storage()
        holders = [
            position
            for position, value in enumerate(args)
            if type(value) is FakeTensor and value.untyped_storage() is storage
        ]
        if not holders and any(value.untyped_storage() is storage for value in _fake_leaves((args, kwargs))):
            return _NOT_PLAIN
        of = holders[0] if holders else -1
        return NewTensor(of, tuple(part.shape), part.stride(), part.dtype, part.storage_offset())


_NOT_PLAIN = object()


def _fake_leaves(values: Any) -> list[FakeTensor]:
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, FakeTensor)]


def _equals(made: Any, real: Any) -> bool:
    """Return whether a tensor made from the cache equals the real result, including the dispatch keys."""
    if made is None or made is real:
        return made is real
    keys = torch._C._dispatch_key_set
    return (
        made.storage_offset() == real.storage_offset()
        and made.untyped_storage().nbytes() == real.untyped_storage().nbytes()
        and not made.requires_grad
        and not made.is_neg()
        and not made.is_conj()
        and made.fake_device == _CPU
        and bool(keys(made) == keys(real))
    )
