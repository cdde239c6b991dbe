"""Ctrl-C at any line of some files."""

from __future__ import annotations

import itertools
import sys
from typing import Any


def interrupted_at(at: int, work: Any, files: frozenset[str]) -> bool:
    """Run `work` with Ctrl-C before line `at` of the code in `files`; return whether the line was reached."""
    lines = itertools.count()
    broken = False

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal broken
        skipped = ("disturb", "offload_all", "_make")
        if frame.f_code.co_filename not in files or frame.f_code.co_name in skipped:
            return trace if event == "call" else None
        if event == "line" and next(lines) == at:
            broken = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return broken
