"""Generation by transformers in a rehearsal: ends at the largest length, without values of the device."""

from __future__ import annotations

import functools
import sys
from typing import Any

_CRITERIA, _LOOP = "transformers.generation.stopping_criteria", "transformers.generation.utils"
#: Modules after whose import `end_at_length` is called.
MODULES = (_CRITERIA, _LOOP)
_reached: list[bool] = []  # one entry once the running generation has its longest sequence


def end_at_length(name: str) -> None:
    """End generations at their largest length, since other criteria need values of the device."""
    if name == _CRITERIA:
        criterion = sys.modules[_CRITERIA].MaxLengthCriteria
        criterion.__call__ = _noting(criterion.__call__)
    else:
        mixin = sys.modules[_LOOP].GenerationMixin
        mixin._has_unfinished_sequences = _ending(mixin._has_unfinished_sequences)


def _noting(method: Any) -> Any:
    @functools.wraps(method)
    def call(criterion: Any, input_ids: Any, *args: Any, **options: Any) -> Any:
        if input_ids.shape[-1] >= criterion.max_length:
            _reached.append(True)
        return method(criterion, input_ids, *args, **options)

    return call


def _ending(method: Any) -> Any:
    @functools.wraps(method)
    def has_unfinished(*args: Any, **options: Any) -> bool:
        if _reached:
            _reached.clear()
            return False
        return bool(method(*args, **options))

    return has_unfinished
