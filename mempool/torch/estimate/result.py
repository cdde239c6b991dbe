"""Result of an estimate: memory by holder, verdict, caveats, and tried remedies."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mempool.analysis.remedies import Remedy
from mempool.torch.estimate.attribution import ModuleShare, merged
from mempool.torch.estimate.options import OPTIONS
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traces import Trace

#: Multiples in bytes to which a device's allocator rounds sizes up.
ROUNDED_TO = {"cuda": 512, "cpu": 1}
AS_FAR_AS_RAN = "only of what ran"
RECURRENT = (
    "without cuDNN's recurrent layers: they keep a reserve for the backward pass, which may be most of the "
    "memory; a rehearsal of the program counts it"
)


class Caveat(NamedTuple):
    """A restriction of a result: a label next to the verdict, and the reason."""

    label: str
    reason: str

    def __str__(self) -> str:
        return f"{self.label}: {self.reason}"


@dataclass(frozen=True)
class TriedRemedy(Remedy):
    """A tried change, or combination of changes; sizes in bytes.

    Attributes:
        name: a few words.
        saves_bytes: reduction of the needed device memory (reserved bytes and margins).
        how: description and price.
        code: lines to write in the user's program.
        needed_bytes: needed device memory after the change.
        peak_bytes: peak load after the change.
        fits: whether the changed job fits; None without a limit.
        cost: name of a `mempool.torch.estimate.remedies.changes.Cost`, in lower case.
        parts: names of the combined changes.
    """

    code: str
    needed_bytes: int
    peak_bytes: int
    fits: bool | None
    cost: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """Remedies for a job.

    Attributes:
        remedies: changes that save memory, the largest saving first.
        cheapest: the cheapest combination, by `Cost`, that makes the job fit; None if the job fits already,
            if no combination suffices, or without a limit.
        combined: all changes that preserve the training, if even their combination does not suffice.
        not_tried: reasons of changes that could not be tried, by name.
        hints: further advice.
    """

    remedies: list[TriedRemedy] = field(default_factory=list)
    cheapest: TriedRemedy | None = None
    combined: TriedRemedy | None = None
    not_tried: list[tuple[str, str]] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Fit:
    """Memory that a step of a job needs, in bytes; `print` shows a report.

    Attributes:
        peak_bytes: peak load of a program, or of steps after the first, with the rounding of the device's
            allocator.
        by_class_bytes: ``peak_bytes`` by category; the sum is ``peak_bytes``.
        by_module: ``peak_bytes`` by module, the largest first; the sum is ``peak_bytes``.
        by_phase_bytes: peak load in the forward pass, the backward pass, and the optimizer's step.
        peak_operation: operation at the peak; ``peak_phase`` and ``peak_module`` (a path) are its phase and
            module.
        first_step_bytes: peak load of the first step, in which the optimizer's state is made.
        reserved_bytes: device memory that each allocator would reserve, by simulation.
        margin_bytes: memory that a GPU adds outside all operations, by name.
        allocator: the allocator to which ``fits``, ``missing_bytes`` and ``largest_batch`` refer.
        batch: samples in a batch, None for a program; ``mode`` and ``device`` as in the job.
        limit_bytes: the device's memory; None if not given.
        fits: whether ``needed_bytes`` are at most ``limit_bytes``; None without a limit, or if a fit has
            ``caveats``.
        missing_bytes: excess of ``needed_bytes`` over the limit; 0 if the job fits, None without a limit.
        largest_batch: largest batch that fits, by search; 0 if no batch fits, None without a search.
        warnings: sources of uncertainty of the result.
        trace: the recorded trace, with unrounded sizes.
        advice: remedies, the cheapest combination that makes the job fit, and hints; None without trials.
        caveats: parts missing in the estimate, so that a step may need more.
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
    batch: int | None
    mode: str
    device: str
    limit_bytes: int | None
    fits: bool | None
    missing_bytes: int | None
    trace: Trace = field(repr=False)
    largest_batch: int | None = None
    warnings: list[str] = field(default_factory=list)
    advice: Advice | None = field(default=None, repr=False)
    caveats: list[Caveat] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """Return the needed device memory: the bytes reserved by ``allocator``, and the margins."""
        return self.reserved_bytes[self.allocator] + sum(self.margin_bytes.values())

    @property
    def remedies(self) -> list[TriedRemedy]:
        """Return the remedies, largest saving first."""
        return [] if self.advice is None else self.advice.remedies

    @property
    def caveat_labels(self) -> str:
        """Return the labels of the caveats as text after a verdict; "" without caveats."""
        return ", ".join(dict.fromkeys(caveat.label for caveat in self.caveats))

    @property
    def verdict(self) -> str:
        """Return one line: whether the job fits, and the missing or spare bytes."""
        labels = f" ({self.caveat_labels})" if self.caveats else ""
        if self.limit_bytes is None:
            return f"needs {binary(self.needed_bytes)}{labels}"
        limit = binary(self.limit_bytes)
        if self.fits is None:
            return f"not known whether it fits in {limit}: {binary(self.needed_bytes)}{labels}"
        if self.fits:
            return f"fits in {limit} with {binary(self.limit_bytes - self.needed_bytes)} to spare"
        return f"does not fit in {limit}: {binary(self.missing_bytes or 0)} short{labels}"

    def restricted(self, caveats: Sequence[Caveat]) -> Fit:
        """Return the result with further caveats, which make a fit undecided."""
        if not caveats:
            return self
        return replace(
            self,
            fits=self.fits and None,
            caveats=[*self.caveats, *caveats],
            warnings=[*map(str, caveats), *self.warnings],
        )

    def with_warnings(self, warnings: Sequence[str]) -> Fit:
        """Return the result with warnings; a warning about recurrent layers is a caveat."""
        others = [text for text in warnings if text != RECURRENT]
        label, _, reason = RECURRENT.partition(": ")
        caveats = [Caveat(label, reason)] if len(others) < len(warnings) else []
        return replace(self, warnings=[*self.warnings, *others]).restricted(caveats)

    def modules(self, depth: int) -> list[ModuleShare]:
        """Return ``by_module`` with modules below a depth merged into their ancestor, the largest first."""
        return merged(self.by_module, depth)

    def to_dict(self) -> dict[str, Any]:
        """Return the result without the trace as a dictionary ready for JSON."""
        names = [name for name in self.__dataclass_fields__ if name not in ("trace", "by_module", "advice")]
        advice = {} if self.advice is None else self.advice.to_dict()
        caveats = [caveat._asdict() for caveat in self.caveats]
        return {name: getattr(self, name) for name in names} | {
            "needed_bytes": self.needed_bytes,
            "caveats": caveats,
            "by_module": [asdict(share) for share in self.by_module],
            "remedies": advice.get("remedies", []),
            "cheapest_remedy": advice.get("cheapest"),
            "hints": advice.get("hints", []),
        }

    def __str__(self) -> str:
        modules = self.modules(3)[: OPTIONS.report_modules]
        peak = (
            f"peak load {binary(self.peak_bytes)} in the {self.peak_phase or 'step'}, {self.peak_operation}"
        )
        rows = {
            peak: self.by_class_bytes,
            "by module": {share.module or "(the model)": share.bytes for share in modules},
            "reserved by": self.reserved_bytes,
            "and beside it": self.margin_bytes,
            "what would help, by": {f"{r.name}: {r.how}": r.saves_bytes for r in self.remedies},
        }
        lines = [self.verdict]
        for title, sizes in rows.items():
            lines += [title] * bool(sizes)
            lines += [f"  {binary(size):>11}  {name}" for name, size in sizes.items()]
        return "\n".join(lines + [f"note: {text}" for text in self.warnings])
