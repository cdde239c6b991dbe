"""Run a program and sample its pool many times a second: ``observe.py FILE SCRIPT [ARGS]...``.

Writes a JSON list of samples, each with what is reserved, persistent and planned at one moment, in bytes.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
import time
from pathlib import Path

KEYS = ("state", "reserved_bytes", "persistent_bytes", "peak_load_bytes", "planned_buffers", "hits")


def watch(samples: list[dict[str, object]], stop: threading.Event) -> None:
    import mempool.numpy

    while not stop.wait(0.002):
        if (pool := mempool.numpy.installed()) is not None:
            report = pool.report().to_dict()
            samples.append({"second": time.monotonic(), **{key: report[key] for key in KEYS}})


def main(file: str, *program: str) -> None:
    samples: list[dict[str, object]] = []
    stop = threading.Event()
    thread = threading.Thread(target=watch, args=(samples, stop))
    thread.start()
    sys.argv = list(program)
    try:
        runpy.run_path(program[0], run_name="__main__")
    finally:
        stop.set()
        thread.join()
        Path(file).write_text(json.dumps(samples))


if __name__ == "__main__":
    main(*sys.argv[1:])
