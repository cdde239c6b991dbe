"""Runs of a benchmark on the stand-in for CUDA, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mempool.hardware.gpu_memory import card
from mempool.rehearsal import Machine, standin


@contextlib.contextmanager
def loaded() -> Iterator[Path]:
    """Load the stand-in, with an H100, and yield a temporary folder; import what the runs share inside."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        standin.write_libraries(folder, standin.find_installation())
        os.environ[standin.SETTINGS] = Machine(card("H100")).settings(standin.find_installation())
        standin.load(folder)
        yield folder


def in_child(run: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call a function in a forked process, which has PyTorch and the stand-in and has not used them."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            result = run(*arguments)
        except BaseException:
            result = {"error": traceback.format_exc()}
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        result = json.loads(answer.read())
    os.wait()
    if "error" in result:
        raise SystemExit(result["error"])
    return result
