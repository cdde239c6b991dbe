"""Comparison of allocators on many traces at once."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mempool.analysis.caveats import caveats
from mempool.analysis.compare import Choice, Row, Unable, compare
from mempool.analysis.parallel import each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor


@dataclass(frozen=True)
class Compared:
    """The result of one file.

    Attributes:
        file: path of the file.
        rows: as `mempool.analysis.compare.compare` yields them.
        caveats: the sentences of `mempool.analysis.caveats`, by device.
        skipped: number of omitted events, by reason; None if the first bad event raises an error.
        error: the reason, in a line, for missing rows; else None.
    """

    file: str
    rows: tuple[Row | Unable, ...] = ()
    caveats: dict[int, list[str]] = field(default_factory=dict)
    skipped: Counter[str] | None = None
    error: str | None = None


def compare_files(
    files: Sequence[str],
    choices: Sequence[Choice] | None = None,
    *,
    limit_bytes: int | None = None,
    lenient: bool = False,
    executor: Executor | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> Iterator[Compared]:
    """Compare allocators on many files; yield each file as soon as ready.

    A file that is no trace, or that kills a process, is reported as such and does not disturb the others.

    Args:
        files: different paths, as the workers see them; traces in any format.
        choices: as for `compare`.
        limit_bytes: as for `compare`.
        lenient: omit impossible events.
        executor: as for `each`. One file without an executor is compared in this process.
        told: for a file compared in this process, called with the present activity.
    """
    task = functools.partial(compare_file, choices=choices, limit_bytes=limit_bytes, lenient=lenient)
    if executor is None and len(files) == 1:
        yield task(files[0], told=told)
        return
    for file, result in each(files, task, executor):
        if isinstance(result, Compared):
            yield result
        else:
            reason = " ".join(str(result).split())[:200]
            yield Compared(file, error=f"{file}: {type(result).__name__}: {reason}")


def compare_file(
    file: str,
    *,
    choices: Sequence[Choice] | None,
    limit_bytes: int | None,
    lenient: bool,
    told: Callable[[str], object] = lambda _: None,
) -> Compared:
    """Compare allocators on one file; errors of the file are reported in the result."""
    from traces.read import read

    skipped = Counter[str]() if lenient else None
    try:
        trace = read(
            file, skipped=skipped, progress=lambda done, total: told(f"reading, {done / max(total, 1):.0%}")
        )
        rows = compare(trace, choices, limit_bytes=limit_bytes, told=lambda name: told(f"simulating {name}"))
        known = {device: caveats(trace.on_device(device), device) for device in trace.devices}
        return Compared(file, tuple(rows), known, skipped)
    except MemoryError:
        return Compared(file, error=f"{file}: out of memory")
    except OSError as error:
        return Compared(file, error=f"{file}: {error.strerror or error}")
    except ValueError as error:
        text = str(error)
        return Compared(file, error=text if text.startswith(file) else f"{file}: {text}")
