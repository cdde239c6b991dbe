"""Logger of the project, ``mempool``; a program's logging setup applies here too."""

from __future__ import annotations

import logging
import sys


class _Unasked(logging.Handler):
    """Handler of warnings for programs without logging setup: as `logging` itself, with our name before."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless another handler does."""
        if logging.getLogger().handlers or len(log.handlers) > 1 or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"mempool: {self.format(record)}\n")
        except Exception:
            self.handleError(record)


log = logging.getLogger("mempool")
log.addHandler(_Unasked(logging.WARNING))
