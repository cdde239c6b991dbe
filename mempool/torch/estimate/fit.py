"""Estimate of the memory of a training step, and whether the step fits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mempool.errors import UsageError
from mempool.recording.optimizers import hooked_optimizer
from mempool.torch.estimate import batch_dims
from mempool.torch.estimate.attribution import AtPeak, ModuleShare, rounded
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fake.isolation import together
from mempool.torch.estimate.inputs import arguments, batch_of, resizable
from mempool.torch.estimate.largest_batch import NoLargestBatchError, largest_batch
from mempool.torch.estimate.measure import DEFAULT_ALLOCATORS, ROUNDED_TO, choice_of, margins_of, reserved
from mempool.torch.estimate.text_report import report
from mempool.torch.estimate.training_step import Job
from mempool.units import parse_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.estimate.caveats import Caveat
    from mempool.torch.estimate.remedies.advise import Helps
    from mempool.torch.estimate.remedies.trials import Help
    from traces import Trace


@dataclass(frozen=True, eq=False)
class Fit:
    """Memory that a step of a job would need. Bytes throughout; `print` shows a report.

    Attributes:
        peak_bytes: peak load in a step after the first, with sizes rounded as by the device's allocator.
        by_class_bytes: ``peak_bytes`` by category; the sum is ``peak_bytes``.
        by_module: ``peak_bytes`` by module, largest first; likewise.
        by_phase_bytes: peak load in the forward, the backward, and the optimizer's step.
        peak_operation: operation that ran at the peak; likewise ``peak_phase``, and ``peak_module``, a path.
        first_step_bytes: peak load of the first step, in which the optimizer's state is made.
        reserved_bytes: device memory that each allocator would hold, by simulation.
        margin_bytes: memory that a GPU adds outside all operations, by name.
        allocator: the allocator to which ``fits``, ``missing_bytes`` and ``largest_batch`` refer.
        batch: samples in a batch; ``mode`` and ``device`` likewise as in the job.
        limit_bytes: the device's memory; None if not given.
        fits: whether ``needed_bytes`` are at most ``limit_bytes``; None without a limit, or if they are and
            ``caveats`` leave the question open.
        missing_bytes: bytes by which the need exceeds the limit; 0 if the job fits, None without a limit.
        largest_batch: largest batch that fits, by search; 0 if none does, None without a search.
        warnings: circumstances that make the result less certain.
        trace: the recorded trace, with unrounded sizes.
        helps: remedies, the cheapest way to make the job fit, and hints; None if nothing was tried.
        caveats: parts that are not covered, so that a step may need more.
    """

    peak_bytes: int
    by_class_bytes: dict[str, int]
    by_module: list[ModuleShare]
    by_phase_bytes: dict[str, int]
    peak_operation: str
    peak_phase: str
    peak_module: str
    first_step_bytes: int
    reserved_bytes: dict[str, int]
    margin_bytes: dict[str, int]
    allocator: str
    batch: int
    mode: str
    device: str
    limit_bytes: int | None
    fits: bool | None
    missing_bytes: int | None
    largest_batch: int | None
    warnings: list[str]
    trace: Trace = field(repr=False)
    helps: Helps | None = field(default=None, repr=False)
    caveats: list[Caveat] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """Return the device memory needed: reserved by ``allocator``, and the margins."""
        return self.reserved_bytes[self.allocator] + sum(self.margin_bytes.values())

    @property
    def remedies(self) -> list[Help]:
        """Return the remedies, largest saving first."""
        return [] if self.helps is None else self.helps.remedies

    @property
    def covers(self) -> str:
        """Return the labels of the caveats, as text beside a verdict; "" without caveats."""
        return ", ".join(dict.fromkeys(caveat.label for caveat in self.caveats))

    def restricted(self, caveats: Sequence[Caveat]) -> Fit:
        """Return the result with further caveats, which leave a fit, with or without a remedy, unknown."""
        if not caveats:
            return self
        return replace(
            self,
            fits=self.fits and None,
            caveats=[*self.caveats, *caveats],
            warnings=[*map(str, caveats), *self.warnings],
            helps=self.helps and self.helps.without_verdicts(),
        )

    def modules(self, depth: int) -> list[ModuleShare]:
        """Return ``by_module`` with modules below a depth merged into their ancestor, largest first."""
        return AtPeak.of(rounded(self.trace, ROUNDED_TO[self.device])).by_module(depth)

    def to_dict(self) -> dict[str, Any]:
        """Return all but the trace as a dictionary ready for JSON."""
        names = [name for name in self.__dataclass_fields__ if name not in ("trace", "by_module", "helps")]
        helps = {} if self.helps is None else self.helps.to_dict()
        caveats = [caveat._asdict() for caveat in self.caveats]
        return {name: getattr(self, name) for name in names} | {
            "needed_bytes": self.needed_bytes,
            "caveats": caveats,
            "by_module": [asdict(share) for share in self.by_module],
            "remedies": helps.get("remedies", []),
            "cheapest_remedy": helps.get("cheapest"),
            "hints": helps.get("hints", []),
            "swapping": helps.get("swapping"),
        }

    def __str__(self) -> str:
        return report(self)


def fit(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    optimizer: Callable[..., torch.optim.Optimizer] | str | None = torch.optim.AdamW,
    *,
    batch: int | None = None,
    batch_dim: int | None = None,
    limit: int | str | None = None,
    loss: Callable[..., torch.Tensor] | str | None = None,
    labels: Any = None,
    mode: str = "train",
    device: str = "cuda",
    allocators: Sequence[str] = DEFAULT_ALLOCATORS,
    remedies: bool = False,
    told: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> Fit:
    """Estimate the memory of a model's step before running it: no GPU, no memory, a second or so.

        import mempool.torch

        print(mempool.torch.fit(model, torch.zeros(32, 3, 224, 224), limit="24GiB"))

    Args:
        model: a module, which stays unchanged, or a function that makes one; the model made has no memory.
        inputs: a tensor, a tuple of arguments, a dictionary of named ones, or a function that makes such of a
            batch's size.
        optimizer: a class, or a function of the parameters (`functools.partial` of a class, say), or a name,
            as ``mempool fit --optimizer`` accepts.
        batch: samples; by default as many as the inputs have. Tensors with this size in the batch dimension
            are resized for other batches.
        batch_dim: the batch dimension. By default the first one, or the second one if the model is, or begins
            with, a recurrent module or a transformer that takes the length first; a warning reports the
            choice if doubtful.
        limit: of the device's memory, in bytes or as "24GiB".
        loss: of the output, and of ``labels`` if given; or a name such as "cross-entropy". By default the
            output's ``loss``, as models of transformers return; else the sum of floating-point outputs, with
            a warning.
        labels: given to ``loss`` beside the output: tensors in any structure, or a function of the batch.
        mode: "train", "inference" (no gradients, no optimizer), or "eval" (no gradients, while the
            optimizer's state of training is alive).
        device: "cuda" or "cpu": the device of the real step.
        allocators: allocators to simulate for the reserved bytes; the first one decides whether the job fits.
        remedies: whether to try remedies, too: some tens of runs.
        told: called with the name of each trial.
        options: further attributes of a `Job` (dtype, autocast, checkpoint, accumulate, ...), and
            ``largest``: False to skip the search for the largest batch if a limit is given.

    Returns:
        The result; ``print`` shows a report.

    Raises:
        UsageError: an argument makes no sense, or the step cannot be tried; one line says where and why.
    """
    dim = batch_dims.dim_of(model, inputs) if batch_dim is None else batch_dim
    if dim < 0:
        raise UsageError(f"batch_dim is {dim}: it cannot be below zero")
    given = batch_of(inputs, labels, dim=dim) if not callable(inputs) else None
    if (batch := given if batch is None else batch) is None:
        raise UsageError("how many samples? give batch=, or inputs with a tensor that has a first dimension")
    if not (optimizer is None or callable(optimizer) or isinstance(optimizer, str)):
        raise UsageError(
            f"the optimizer is a {type(hooked_optimizer(optimizer) or optimizer).__name__} of real "
            "parameters: give its class, or functools.partial of it with its settings"
        )
    if not callable(model):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module or what makes one")
    examples = resizable(inputs, given, dim)
    largest = options.pop("largest", None)
    notes: list[str] = []
    modules: list[str] = []
    by_name: dict[str, Any] = {"optimizer": optimizer, "loss": loss}  # functions, or names of them

    def make() -> nn.Module:
        made = model if isinstance(model, nn.Module) else model()
        if not modules and isinstance(made, nn.Module):
            modules.extend(batch_dims.sequence_first(made))
        return made

    try:
        job = Job(
            model=make,
            inputs=lambda size: arguments(examples(size)),
            batch=batch,
            labels=None if labels is None else resizable(labels, given, dim),
            mode=mode,
            device=device,
            **by_name,
            **options,
        )
    except TypeError as error:
        raise UsageError(str(error)) from None
    limit_bytes = parse_memory(limit) if isinstance(limit, str) else limit
    search = limit_bytes is not None and largest is not False
    if search and given is not None and (note := batch_dims.unscalable(inputs, given, dim)):
        notes, largest = [note], False
    made = fit_job(job, limit_bytes, allocators=allocators, remedies=remedies, largest=largest, told=told)
    if given is not None and (search or batch != given):
        notes += [text for text in [batch_dims.doubt(modules, inputs, given, dim)] if text]
    return replace(made, warnings=[*made.warnings, *notes]) if notes else made


@together()
def fit_job(
    job: Job,
    limit_bytes: int | None = None,
    *,
    allocators: Sequence[str] = DEFAULT_ALLOCATORS,
    remedies: bool | None = None,
    largest: bool | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> Fit:
    """Estimate the memory that a job would need.

    Args:
        job: the step.
        limit_bytes: of the device's memory.
        allocators: by name, the one that decides first.
        remedies: whether to try remedies, some tens of runs; None: if the job does not fit.
        largest: whether to search for the largest batch; None: if a limit is given.
        told: called with the name of each trial.

    Raises:
        UsageError: as `fit`.
    """
    if not allocators:
        raise UsageError("no allocator: name one at least")
    for name in allocators:
        choice_of(name)
    warnings: dict[str, None] = {}
    told(f"batch {job.batch:,}")
    trace = run(job, warn=lambda text: warnings.setdefault(text))
    peak = AtPeak.of(rounded(trace, ROUNDED_TO[job.device]))
    if peak.first_step_bytes > peak.bytes:
        more = peak.first_step_bytes - peak.bytes
        warnings.setdefault(f"the first step peaks {more:,} bytes higher than those that follow")
    held, added = reserved(trace, allocators), margins_of(job, trace)
    needed = held[allocators[0]] + sum(added.values())
    found = None
    if limit_bytes is not None and largest is not False:
        try:
            found = largest_batch(job, limit_bytes, allocators[0], known={job.batch: needed}, told=told)
        except NoLargestBatchError as error:
            warnings.setdefault(str(error))
    fitted = Fit(
        peak_bytes=peak.bytes,
        by_class_bytes=peak.by_class_bytes(),
        by_module=peak.by_module(),
        by_phase_bytes=peak.by_phase_bytes,
        peak_operation=peak.operation,
        peak_phase=peak.phase,
        peak_module=peak.module,
        first_step_bytes=peak.first_step_bytes,
        reserved_bytes=held,
        margin_bytes=added,
        allocator=allocators[0],
        batch=job.batch,
        mode=job.mode,
        device=job.device,
        limit_bytes=limit_bytes,
        fits=None if limit_bytes is None else needed <= limit_bytes,
        missing_bytes=None if limit_bytes is None else max(0, needed - limit_bytes),
        largest_batch=found,
        warnings=list(warnings),
        trace=trace,
    )
    if remedies or (remedies is None and fitted.fits is False):
        from mempool.torch.estimate.remedies.advise import what_would_help  # imports this module

        fitted = replace(fitted, helps=what_would_help(job, fitted, told=told))
    return fitted
