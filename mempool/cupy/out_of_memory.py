"""Subclass of CuPy's out-of-memory error with the pool's numbers; imports CuPy."""

from __future__ import annotations

from typing import Any

from cupy.cuda import memory

from mempool import errors


class OutOfMemoryError(errors.OutOfMemoryError, memory.OutOfMemoryError):  # type: ignore[misc]
    """The pool's error as a subclass of CuPy's error."""

    def __init__(self, numbers: dict[str, int]) -> None:
        plain = errors.OutOfMemoryError(numbers)
        memory.OutOfMemoryError.__init__(
            self, plain.asked_bytes, plain.reserved_bytes, plain.limit_bytes or 0
        )
        self.__dict__.update(plain.__dict__)
        self.args = plain.args
        self._numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._numbers,)
