"""Caches of functions, in which a run would leave tensors without memory for the real run to find."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import operator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

_Cache = functools._lru_cache_wrapper
#: Objects that are looked at in one cache, at most.
_MOST = 10_000
#: What leads out of what a cache holds.
_OUTSIDE = (type, FunctionType, ModuleType)


@contextlib.contextmanager
def caches_forgotten() -> Iterator[None]:
    """Afterwards, caches of functions (``functools.lru_cache``) are empty that the block put fake tensors in.

    Others stay: what they return may be known by identity. PyTorch's own stay too, and those that the program
    has frozen (``gc.freeze``), which cannot be found.
    """
    kept = _caches()
    before = {id(cache): cache.cache_info().misses for cache in kept}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().misses > before.get(id(cache), 0) and _holds_fakes(cache):
                cache.cache_clear()
        del kept  # until here, so that no identity was used again


def _caches() -> list[_Cache[Any]]:
    there = gc.get_objects()
    of_type = map(operator.is_, map(type, there), itertools.repeat(_Cache))
    caches: list[_Cache[Any]] = list(itertools.compress(there, of_type))
    return [cache for cache in caches if not f"{getattr(cache, '__module__', '')}.".startswith("torch.")]


def _holds_fakes(cache: _Cache[Any]) -> bool:
    """Whether there is one in its keys or results, however deep within a bound."""
    seen: set[int] = set()
    near: list[Any] = [cache]
    while near and len(seen) < _MOST:
        found = [each for each in gc.get_referents(*near) if not isinstance(each, _OUTSIDE)]
        if any(type(each) is FakeTensor for each in found):
            return True
        near = [each for each in found if id(each) not in seen and gc.is_tracked(each)]
        seen.update(map(id, near))
    return False
