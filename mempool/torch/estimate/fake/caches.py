"""Functools caches, in which a fake run would leave fake tensors for a later real run."""

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
#: Largest number of objects searched in one cache.
_MOST = 10_000
#: Types not followed in the search, since they lead out of the cache's contents.
_OUTSIDE = (type, FunctionType, ModuleType)


def caches() -> list[_Cache[Any]]:
    """Return all live functools caches (``functools.lru_cache``).

    PyTorch's own are left out; frozen ones (``gc.freeze``) cannot be found.
    """
    there = gc.get_objects()
    of_type = map(operator.is_, map(type, there), itertools.repeat(_Cache))
    found: list[_Cache[Any]] = list(itertools.compress(there, of_type))
    return [cache for cache in found if not f"{getattr(cache, '__module__', '')}.".startswith("torch.")]


@contextlib.contextmanager
def caches_forgotten(known: list[_Cache[Any]]) -> Iterator[None]:
    """Empty the functools caches into which the block put fake tensors.

    Others stay, since their results may be known by identity.

    Args:
        known: existing caches, which `caches` may no longer find.
    """
    before = {id(cache): cache.cache_info().misses for cache in known}
    try:
        yield
    finally:
        for cache in {id(cache): cache for cache in (*known, *caches())}.values():
            if cache.cache_info().misses > before.get(id(cache), 0) and _holds_fakes(cache):
                cache.cache_clear()


def _holds_fakes(cache: _Cache[Any]) -> bool:
    """Return whether a cache's keys or results contain a fake tensor, within `_MOST` objects."""
    seen: set[int] = set()
    near: list[Any] = [cache]
    while near and len(seen) < _MOST:
        found = [each for each in gc.get_referents(*near) if not isinstance(each, _OUTSIDE)]
        if any(type(each) is FakeTensor for each in found):
            return True
        near = [each for each in found if id(each) not in seen and gc.is_tracked(each)]
        seen.update(map(id, near))
    return False
