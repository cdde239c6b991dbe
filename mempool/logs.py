"""The project's logger, ``mempool``: what a program set up for its logs holds for ours."""

from __future__ import annotations

import logging
import sys


class _Unasked(logging.Handler):
    """Warnings where a program has set up nothing, as `logging` itself would show them, with who speaks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, unless another handler does."""
        if logging.getLogger().handlers or len(log.handlers) > 1 or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"mempool: {self.format(record)}\n")
        except Exception:
            self.handleError(record)


log = logging.getLogger("mempool")
log.addHandler(_Unasked(logging.WARNING))
