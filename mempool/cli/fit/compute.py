"""Computation of ``mempool fit``: fits a job of each requested size in turn. Requires PyTorch."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mempool.cli.output import ExitCode, Stop
from mempool.errors import UsageError
from mempool.hardware.gpu_throughput import DEFAULT, rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.estimate import Job, fit_job
from mempool.torch.estimate.estimator import DEFAULT_ALLOCATORS, allocator_specs, judge
from mempool.torch.estimate.failures import BrokenScriptError
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.margins import margins
from mempool.torch.estimate.program import run_program
from mempool.torch.estimate.sources.transformers_models import (
    model_inputs,
    sequence_length,
    transformers_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.cli.fit.arguments import FitRequest
    from mempool.torch.estimate import Fit
    from mempool.torch.estimate.sources.transformers_models import TransformersModel
    from traces import Trace


WITHOUT_CUDA = (
    "this PyTorch has no CUDA: the program ran on tensors without memory, and those of the host, such as a "
    "data set, count, too; with a CUDA build, `mempool rehearse {}` runs it itself"
)


@dataclass(frozen=True)
class SizeResult:
    """A fitted job or program.

    Attributes:
        fit: the result.
        title: description of the model or program.
        tried: description of the step: mode, batch, precision.
        seq: sequence length, if known.
    """

    fit: Fit
    title: str
    tried: str
    seq: int | None = None


def fit_sizes(request: FitRequest, progress: Callable[[str], object]) -> Iterator[SizeResult]:
    """Fit each size in turn: all batches of one sequence length, then of the next length.

    Raises:
        Stop: a size cannot be tried; the message is a line with the reason.
    """
    if request.main:
        progress(f"running {request.target}")
        with stopping(request):
            yield _fit_program(request)
        return
    with _quiet():
        for seq in request.seqs:
            for batch in request.batches:
                with stopping(request):
                    progress(f"making {request.target}")
                    yield _fit_size(request, seq, batch, progress)


def _fit_program(request: FitRequest) -> SizeResult:
    """Run a program on tensors without memory, and judge its trace."""
    allocators = request.allocators or DEFAULT_ALLOCATORS
    allocator_specs(allocators)
    device, capability = request.job.get("device", "cuda"), request.capability or (8, 0)
    done = run_program(request.target.where, request.arguments, device=device, capability=capability)
    fitted = judge(
        done.trace,
        request.limit_bytes,
        allocators=allocators,
        device=device,
        margin_bytes=margins(done.trace, device, capability=capability),
        batch=None,
        mode=done.mode,
        whole=True,
    )
    notes = [*request.notes, *done.notes, WITHOUT_CUDA.format(request.target)]
    fitted = fitted.with_warnings(notes if device == "cuda" else notes[:-1]).restricted(done.caveats)
    return SizeResult(fitted, str(request.target), f"{done.mode}, as a program, on {device}")


def _fit_size(
    request: FitRequest, seq: int | None, batch: int | None, progress: Callable[[str], object]
) -> SizeResult:
    found = transformers_model(request.target.name, request.target.arguments, request.task)
    length = sequence_length(found, seq)
    if seq is not None and length is None:
        raise UsageError(f"--seq would change nothing: {request.target} takes pictures")
    job = _job(request, found, length, batch)
    title = f"{request.target}" + (f", seq {length:,}" if length else "")
    fitted = fit_job(
        job,
        request.limit_bytes,
        allocators=request.allocators or DEFAULT_ALLOCATORS,
        remedies=request.remedies,
        largest=request.largest,
        most_seconds=request.most_seconds,
        progress=lambda now: progress(f"{title}: {now}"),
    )
    if request.traced:
        fitted = replace(fitted, trace=_timed(job))
    fitted = replace(fitted, warnings=[*request.notes, *fitted.warnings])
    model = f"{found.kind.__name__} of {found.config.model_type} ({found.task})"
    return SizeResult(fitted, model, _description(job, length), length)


def _description(job: Job, seq: int | None) -> str:
    parts = [job.mode, f"batch {job.batch:,}"]
    if seq:
        parts.append(f"seq {seq:,}")
    kinds = {name: getattr(job, name) for name in ("dtype", "autocast")}
    parts += [f"{name} {str(k).removeprefix('torch.')}" for name, k in kinds.items() if k is not None]
    if job.checkpoint:
        parts.append("activation checkpointing")
    return ", ".join([*parts, f"on {job.device}"])


def _timed(job: Job) -> Trace:
    """Trace three steps with roofline times: the second is complete; the third has the later frees."""
    rates = rates_of(job.card or DEFAULT, job.capability)
    trace = run(job, 3, clock=Roofline(rates).nanoseconds)
    return replace(trace, metadata=dict(trace.metadata) | {"rates": str(rates)})


def _job(request: FitRequest, found: TransformersModel, seq: int | None, batch: int | None) -> Job:
    labels = request.job.get("mode", "train") == "train"

    def inputs(size: int) -> Any:
        return (), model_inputs(found, size, seq, labels=labels)

    attributes: dict[str, Any] = {"optimizer": "adamw", "batch": batch or 1} | request.job
    if request.capability is not None:
        attributes["capability"] = request.capability
    if request.card is not None:
        attributes["card"] = request.card
    return Job(model=found.model, inputs=inputs, **attributes)


@contextlib.contextmanager
def stopping(request: FitRequest) -> Iterator[None]:
    """Convert errors into `Stop` with one line."""
    try:
        yield
    except BrokenScriptError as error:
        raise Stop(ExitCode.FILE, str(error)) from error
    except UsageError as error:
        raise Stop(ExitCode.USAGE, str(error)) from error
    except OSError as error:
        if error.filename is None or os.environ.get("MEMPOOL_TRACEBACK"):
            raise
        raise Stop(ExitCode.FILE, f"{error.filename}: {error.strerror or error}") from error
    except (KeyboardInterrupt, Stop, MemoryError):
        raise
    except Exception as error:
        if os.environ.get("MEMPOOL_TRACEBACK"):
            raise
        where = "; ".join(note.removeprefix("mempool: ") for note in getattr(error, "__notes__", ()))
        text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        if "BF16" in text:
            text += " (try --dtype bfloat16)"
        raise Stop(ExitCode.USAGE, f"{request.target} fails {where or 'when it is made'}: {text}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of libraries that users cannot remedy."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
