"""Text report of a fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool.torch.estimate.fit import Fit

#: Largest number of modules in a report.
MOST_MODULES = 5


def report(fit: Fit) -> str:
    """Format the verdict, the peak by holder, allocators, and remedies, in some lines."""
    lines = [_verdict(fit), ""]
    where = f" in {fit.peak_module}" if fit.peak_module else ""
    lines.append(
        f"peak load {size(fit.peak_bytes)} in the {fit.peak_phase or 'step'}, {fit.peak_operation}{where}"
    )
    lines += [f"  {size(b):>11}  {name.replace('_', ' ')}" for name, b in fit.by_class_bytes.items()]
    lines.append("by module")
    lines += [f"  {size(m.bytes):>11}  {m.module or '(the model)'}" for m in fit.modules(3)[:MOST_MODULES]]
    lines.append("reserved by")
    lines += [f"  {size(b):>11}  {name}" for name, b in fit.reserved_bytes.items()]
    if fit.margin_bytes:
        lines.append("and beside it")
        lines += [f"  {size(b):>11}  {name.replace('_', ' ')}" for name, b in fit.margin_bytes.items()]
    if fit.remedies:
        lines.append("what would help, by")
        lines += [f"  {size(r.saves_bytes):>11}  {r.name}: {r.how}" for r in fit.remedies]
    return "\n".join(lines + [f"note: {text}" for text in fit.warnings])


def size(number: int) -> str:
    """Format bytes in the largest unit with a value of at least one."""
    value, unit = float(number), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"


def _verdict(fit: Fit) -> str:
    need = f"batch {fit.batch:,} needs {size(fit.needed_bytes)} with {fit.allocator}"
    need += f" ({fit.covers})" if fit.caveats else ""
    if fit.limit_bytes is None:
        return need
    told = {
        True: "it fits",
        False: f"it does not fit, {size(fit.missing_bytes or 0)} are missing",
        None: "not known whether it fits",
    }[fit.fits]
    batch = "" if fit.largest_batch is None else f"; the largest batch that fits is {fit.largest_batch:,}"
    return f"{told}: {need} of {size(fit.limit_bytes)}{batch}"
