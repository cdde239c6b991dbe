"""Logger of the project, ``mempool``; a program's logging setup applies here too."""

from __future__ import annotations

import logging
import sys


class _Unasked(logging.Handler):
    """Handler of warnings in programs without logging setup: prints as `logging` does, after our name."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless the program has a handler."""
        if logging.getLogger().handlers or len(log.handlers) > 1 or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"mempool: {self.format(record)}\n")
        except Exception:
            self.handleError(record)


log = logging.getLogger("mempool")
log.addHandler(_Unasked(logging.WARNING))
