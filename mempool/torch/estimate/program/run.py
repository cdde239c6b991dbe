"""Runs a program on tensors without memory in a separate process, and returns its trace."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mempool.rehearsal import kept_files
from mempool.rehearsal.job import Job, Outcome
from mempool.torch.estimate.failures import BrokenScriptError
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.result import AS_FAR_AS_RAN, Caveat
from traces.formats.parquet import read_trace
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from traces import Trace

REHEARSE = "a CUDA build of PyTorch runs the program itself: pip install torch, then mempool rehearse {}"
#: Notes about the values that a program reads from tensors without values.
GUESSES = "conditions are taken to be false, and numbers zero"
#: Additional environment variables of the program's process.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "PYTORCH_JIT": "0", "CUDA_VISIBLE_DEVICES": ""}
TRACE, OUTCOME = "step.trace", "outcome.json"  #: files in the folder of a job


@dataclass
class ProgramOutcome(Outcome):
    """Outcome that the program's process reports; ``value_reads`` is the number of number reads.

    Attributes:
        decisions: number of reads of a condition on values, by source line.
    """

    decisions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramRun:
    """Result of a program's run on tensors without memory.

    Attributes:
        trace: allocations of the program on the device, with unrounded sizes.
        mode: "train", or "inference" for a program without a backward pass.
        notes: sentences for the user.
        caveats: reasons why the trace leaves open whether the program fits.
    """

    trace: Trace
    mode: str
    notes: list[str]
    caveats: list[Caveat]


def run_program(
    path: str,
    arguments: Sequence[str] = (),
    *,
    device: str = "cuda",
    capability: tuple[int, int] = (8, 0),
    seconds: float = OPTIONS.program_seconds,
) -> ProgramRun:
    """Run a script as a program on tensors without memory, for some optimizer steps.

    The program's output goes to stderr.

    Args:
        path: path of the script.
        arguments: the script's arguments in ``sys.argv``.
        device: "cuda" or "cpu": the device of the real run.
        capability: compute capability of the device.
        seconds: time without an optimizer step after which the program is refused.

    Raises:
        OSError: the file cannot be read.
        BrokenScriptError: the program fails; the message has the location and the reason.
    """
    Path(path).read_bytes()
    with tempfile.TemporaryDirectory(prefix="mempool-fit-") as folder:
        job = Job((path, *arguments), folder, steps=OPTIONS.program_steps, timeout=seconds)
        outcome = _run_child([job.to_json(), device, *map(str, capability)], Path(folder))
        if not outcome.complete:
            raise BrokenScriptError(_failure(path, outcome))
        trace = read_trace(Path(folder, TRACE))
    marks = {trace.names[name] for name in trace.operation[trace.kind == EventType.MARK] if name >= 0}
    notes, caveats = list(outcome.notes), []
    if outcome.value_reads:
        notes.append(
            f"numbers read from tensors are zero; the program reads some at {_some(outcome.value_reads)}, "
            "and a size or a branch that depends on them is another in the real run"
        )
    if outcome.decisions:
        verb = "decides" if len(outcome.decisions) == 1 else "decide"
        unknown = f"{verb} by values of tensors, unknown before the run: {GUESSES}"
        caveats.append(Caveat(AS_FAR_AS_RAN, f"{_some(outcome.decisions)} {unknown}"))
    return ProgramRun(trace, "train" if "backward" in marks else "inference", notes, caveats)


def start_process(request: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start the program's process for the arguments of its ``main``, which redirects files into a folder."""
    command = [sys.executable, "-m", "mempool.torch.estimate.program.child", *request]
    environment = os.environ | ENVIRONMENT | kept_files.environment(folder, time.time_ns())
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2)  # noqa: S603 - the user's own program


def _run_child(request: Sequence[str], folder: Path) -> ProgramOutcome:
    """Run the program's process to its end; Ctrl-C ends both."""
    process = start_process(request, folder)
    try:
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        kept_files.finish(folder)
    if (folder / OUTCOME).is_file():
        return ProgramOutcome.read(folder / OUTCOME)
    return ProgramOutcome("", message=f"the program's process ended by exit code {code}")


def _failure(path: str, outcome: ProgramOutcome) -> str:
    places = list(outcome.decisions)
    behind = f" (behind {places[-1]}, which decides by a value: {GUESSES})" if places else ""
    ranks = "--ranks 2 " * ("torch.distributed" in outcome.message)
    return f"{outcome.line or path}: {outcome.message}{behind}; {REHEARSE.format(ranks + path)}"


def _some(places: Collection[str]) -> str:
    shown = ", ".join(list(places)[: OPTIONS.message_lines])
    more = len(places) - OPTIONS.message_lines
    return f"{shown} and {more} more" if more > 0 else shown
