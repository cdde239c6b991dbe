"""Run of a program on tensors without memory, in a process of its own, and its trace."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mempool.torch.estimate.failures import BrokenScriptError
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.result import AS_FAR_AS_RAN, Caveat
from traces.formats.parquet import read_trace
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from traces import Trace

REHEARSE = "a CUDA build of PyTorch runs the program itself: pip install torch, then mempool rehearse {}"
#: What a program finds where it reads values.
GUESSES = "conditions are taken to be false, and numbers zero"
#: Environment of the program's process besides its own.
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "PYTORCH_JIT": "0", "CUDA_VISIBLE_DEVICES": ""}
_TRACE, _RESULT = "step.trace", "result.json"


@dataclass(frozen=True)
class Request:
    """A program to run.

    Attributes:
        path: of the script.
        arguments: the script's arguments in ``sys.argv``.
        folder: gets the trace, the result, and what the program would write over.
        device: "cuda" or "cpu": the device of the real run.
        capability: compute capability of the device.
        steps: optimizer steps after which the program ends.
        seconds: time without an optimizer step after which the program is refused.
    """

    path: str
    arguments: tuple[str, ...]
    folder: str
    device: str = "cuda"
    capability: tuple[int, int] = (8, 0)
    steps: int = OPTIONS.program_steps
    seconds: float = OPTIONS.program_seconds


@dataclass
class Result:
    """The end of a program, as the program's process reports it.

    Attributes:
        message: reason why the program cannot be tried, in one line; "" if it was.
        line: place of that, as ``file:line``.
        decisions: lines that read conditions on values.
        numbers: lines that read numbers.
        notes: sentences for the user.
    """

    message: str = ""
    line: str = ""
    decisions: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def write(self, folder: str) -> None:
        """Write the result into the folder of a run."""
        Path(folder, _RESULT).write_text(json.dumps(dataclasses.asdict(self)), "utf-8")


@dataclass(frozen=True)
class ProgramRun:
    """A program that ran on tensors without memory.

    Attributes:
        trace: allocations of the program on the device, with unrounded sizes.
        mode: "train", or "inference" for a program without a backward pass.
        notes: sentences for the user.
        caveats: reasons why the trace does not settle whether the program fits.
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
        path: of the script.
        arguments: the script's arguments in ``sys.argv``.
        device: "cuda" or "cpu": the device of the real run.
        capability: compute capability of the device.
        seconds: time without an optimizer step after which the program is refused.

    Raises:
        OSError: the file cannot be read.
        BrokenScriptError: the program fails; the message says where and why.
    """
    Path(path).read_bytes()
    with tempfile.TemporaryDirectory(prefix="mempool-fit-") as folder:
        request = Request(path, tuple(arguments), folder, device, capability, seconds=seconds)
        _run_child(request)
        result = _result(request)
        if result.message:
            raise BrokenScriptError(_failure(request, result))
        trace = read_trace(Path(folder, _TRACE))
    marks = {trace.names[name] for name in trace.operation[trace.kind == EventType.MARK] if name >= 0}
    return ProgramRun(
        trace,
        "train" if "backward" in marks else "inference",
        [*result.notes, *_number_notes(result)],
        list(_caveats(result)),
    )


def start_process(request: str) -> subprocess.Popen[bytes]:
    """Start the program's process for a request in JSON."""
    command = [sys.executable, "-m", "mempool.torch.estimate.program.child", request]
    return subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=2)  # noqa: S603 - the user's own program


def _run_child(request: Request) -> None:
    """Run the program's process to its end; Ctrl-C ends it, too."""
    process = start_process(json.dumps(dataclasses.asdict(request)))
    try:
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if not Path(request.folder, _RESULT).is_file():
        Result(message=f"the program's process ended by exit code {code}").write(request.folder)


def _result(request: Request) -> Result:
    values: dict[str, Any] = json.loads(Path(request.folder, _RESULT).read_text("utf-8"))
    return Result(**values)


def _failure(request: Request, result: Result) -> str:
    behind = (
        f" (behind {result.decisions[-1]}, which decides by a value: {GUESSES})" if result.decisions else ""
    )
    place = result.line or request.path
    ranks = "--ranks 2 " * ("torch.distributed" in result.message)
    return f"{place}: {result.message}{behind}; {REHEARSE.format(ranks + request.path)}"


def _number_notes(result: Result) -> Iterator[str]:
    if result.numbers:
        yield (
            f"numbers read from tensors are zero; the program reads some at {_some(result.numbers)}, and a "
            "size or a branch that depends on them is another in the real run"
        )


def _some(lines: Sequence[str]) -> str:
    shown = ", ".join(lines[: OPTIONS.message_lines])
    more = len(lines) - OPTIONS.message_lines
    return f"{shown} and {more} more" if more > 0 else shown


def _caveats(result: Result) -> Iterator[Caveat]:
    if result.decisions:
        verb = "decides" if len(result.decisions) == 1 else "decide"
        unknown = f"{verb} by values of tensors, unknown before the run: {GUESSES}"
        yield Caveat(AS_FAR_AS_RAN, f"{_some(result.decisions)} {unknown}")
