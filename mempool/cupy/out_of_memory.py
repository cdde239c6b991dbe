"""CuPy's error with the pool's numbers. It imports CuPy: import it where that is there."""

from __future__ import annotations

from typing import Any

from cupy.cuda import memory

from mempool import errors


class OutOfMemoryError(errors.OutOfMemoryError, memory.OutOfMemoryError):  # type: ignore[misc]
    """The pool's error where CuPy's own is expected."""

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
