"""Output of ``mempool fit``: one JSON object or a list, a verdict and tables, a chart of a sweep."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mempool.cli.output import console, facts, plain, table
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.cli.fit.compute import Tried
    from mempool.torch.estimate import Fit

#: Largest number of modules in the output, and their largest depth below the model.
MOST_MODULES, DEPTH = 8, 4
_BAR = 30


def answer(one: Tried) -> dict[str, Any]:
    """Return the object of ``--json``."""
    about = {
        "model": one.target.title,
        "batch": one.job.batch,
        "seq": one.target.seq,
        "image": one.image,
        "mode": one.job.mode,
        "device": one.job.device,
    }
    return about | one.fit.to_dict()


def verdict(fit: Fit) -> str:
    """Return the first line of the output."""
    covers = f" ({fit.covers})" if fit.caveats else ""
    if fit.limit_bytes is None:
        return f"needs {binary(fit.needed_bytes)}{covers}"
    if fit.fits is None:
        needed, limit = binary(fit.needed_bytes), binary(fit.limit_bytes)
        return f"not known whether it fits in {limit}: {needed}{covers}"
    if fit.fits:
        spare = fit.limit_bytes - fit.needed_bytes
        return f"fits in {binary(fit.limit_bytes)} with {binary(spare)} to spare"
    return f"does not fit in {binary(fit.limit_bytes)}: {binary(fit.missing_bytes or 0)} short{covers}"


def show(one: Tried) -> None:
    """Print all results of one job."""
    fit = one.fit
    say = console().print
    say(plain(verdict(fit)))
    warnings = _warnings(one)
    for text in warnings:
        say(plain(f"warning: {text}"))
    facts("", _facts(one))
    peak = max(fit.peak_bytes, 1)
    _shares(
        "at the peak by class",
        "class",
        [(k.replace("_", " "), v) for k, v in fit.by_class_bytes.items()],
        peak,
    )
    _shares("at the peak by module", "module", modules(fit)[:MOST_MODULES], peak)
    table("\nreserved of the device, with what a GPU adds", *_allocators(fit))
    _help(fit)
    for text in fit.warnings:
        if text not in warnings:
            say(plain(f"note: {text}"))


def _warnings(one: Tried) -> list[str]:
    """Return the lines next to the verdict."""
    return [*map(str, one.fit.caveats), *one.target.warnings]


def modules(fit: Fit) -> list[tuple[str, int]]:
    """Return the bytes at the peak by module, largest first; layers that differ only by number are merged."""
    found: dict[str, list[int]] = {}
    for share in fit.modules(DEPTH):
        name = re.sub(r"\.\d+(?=\.|$)", ".*", share.module) or "(no module)"
        found.setdefault(name, []).append(share.bytes)
    rows = [(f"{n} ({len(each)})" if len(each) > 1 else n, sum(each)) for n, each in found.items()]
    return sorted(rows, key=lambda row: -row[1])


def _facts(one: Tried) -> list[tuple[str, str]]:
    fit = one.fit
    where = f" in {fit.peak_module}" if fit.peak_module else ""
    phases = ", ".join(f"{name} {binary(size)}" for name, size in fit.by_phase_bytes.items())
    rows = [
        ("model", one.target.title),
        ("tried", _tried(one)),
        (
            "peak load",
            f"{binary(fit.peak_bytes)} in the {fit.peak_phase or 'step'}, {fit.peak_operation}{where}",
        ),
        ("by phase", phases),
    ]
    if fit.margin_bytes:
        parts = ", ".join(
            f"{name.replace('_', ' ')} {binary(size)}" for name, size in fit.margin_bytes.items()
        )
        rows.append(("a GPU adds", f"{binary(sum(fit.margin_bytes.values()))}: {parts}"))
    if fit.largest_batch is not None:
        largest = f"{fit.largest_batch:,}" if fit.largest_batch else "none: not even one sample fits"
        covers = f" ({fit.covers})" if fit.caveats else ""
        rows.append(("largest batch", largest + covers))
    return rows


def _tried(one: Tried) -> str:
    job = one.job
    parts = [job.mode, f"batch {job.batch:,}"]
    if one.target.seq:
        parts.append(f"seq {one.target.seq:,}")
    if one.image:
        parts.append(f"images of {one.image} x {one.image}")
    kinds = {name: getattr(job, name) for name in ("dtype", "autocast")}
    parts += [f"{name} {str(k).removeprefix('torch.')}" for name, k in kinds.items() if k is not None]
    if job.checkpoint:
        parts.append("activation checkpointing")
    return ", ".join([*parts, f"on {job.device}"])


def _shares(title: str, what: str, rows: Sequence[tuple[str, int]], peak: int) -> None:
    lines = [(name, binary(size), f"{100 * size / peak:.1f} %") for name, size in rows if size]
    table(f"\n{title}", (what, "bytes", "share"), lines)


def _allocators(fit: Fit) -> tuple[list[str], list[list[str]]]:
    added = sum(fit.margin_bytes.values())
    limited = fit.limit_bytes is not None
    lines = [
        [
            name,
            binary(size),
            binary(size + added),
            *[_fits("no" if size + added > (fit.limit_bytes or 0) else "yes", fit)] * limited,
        ]
        for name, size in fit.reserved_bytes.items()
    ]
    return ["allocator", "reserved", "in all", *["fits"] * limited], lines


def _fits(answer: str, fit: Fit) -> str:
    """Return a table row's answer; "yes" becomes "?" where caveats apply."""
    return "?" if fit.caveats and answer == "yes" else answer


def _help(fit: Fit) -> None:
    if fit.helps is None:
        return
    say = console().print
    if fit.remedies:
        say("\nwhat would help")
    for remedy in fit.remedies:
        if 200 * remedy.saves_bytes >= fit.peak_bytes:
            fits = ", and it fits" if remedy.fits else ""
            say(plain(f"  {remedy.name}: saves {binary(remedy.saves_bytes)}{fits}; {remedy.how}"))
            _code(remedy.code)
    together = fit.helps.cheapest or fit.helps.together
    if together is not None:
        enough = f"the cheapest that makes {'this much' if fit.caveats else 'it'} fit"
        what = enough if fit.helps.cheapest else "all of it, which is not enough"
        say(plain(f"\n{what}: {together.name}; {together.how}"))
        _code(together.code)
    for name, why in fit.helps.not_tried:
        say(plain(f"not tried: {name}, {why}"))
    for hint in fit.helps.hints:
        say(plain(f"hint: {hint}"))


def _code(code: str) -> None:
    for line in code.splitlines():
        console().print(plain(f"      {line}"))


def show_sweep(tried: Sequence[Tried], limit_bytes: int | None) -> None:
    """Print a row for each size, with a bar of the needed bytes."""
    if limit_bytes is not None:
        console().print(plain(_summary(tried, limit_bytes)))
    first = _warnings(tried[0])
    for text in first:
        console().print(plain(f"warning: {text}"))
    most = max(max(one.fit.needed_bytes for one in tried), limit_bytes or 0)
    columns = [name for name in ("image", "seq") if any(_size(one, name) for one in tried)]
    header = [*columns, "batch", "peak load", "reserved", "in all", *["fits"] * (limit_bytes is not None), ""]
    lines = [
        [
            *(f"{_size(one, name):,}" for name in columns),
            f"{one.job.batch:,}",
            binary(one.fit.peak_bytes),
            binary(one.fit.reserved_bytes[one.fit.allocator]),
            binary(one.fit.needed_bytes),
            *[_fits("no" if one.fit.fits is False else "yes", one.fit)] * (limit_bytes is not None),
            _bar(one.fit.needed_bytes, limit_bytes, most),
        ]
        for one in tried
    ]
    table(
        f"{tried[0].target.title}, {tried[0].job.mode}, {tried[0].fit.allocator}",
        header,
        lines,
        fold=len(header) - 1,
    )
    for text in dict.fromkeys(text for one in tried for text in one.fit.warnings):
        if text not in first:
            console().print(plain(f"note: {text}"))


def _size(one: Tried, name: str) -> int:
    return (one.image if name == "image" else one.target.seq) or 0


def _summary(tried: Sequence[Tried], limit_bytes: int) -> str:
    fitting = [one for one in tried if one.fit.fits is not False]
    if fitting and (covers := fitting[0].fit.covers):
        known = f"not known whether {len(fitting)} of {len(tried)} sizes fit"
        return f"{known} in {binary(limit_bytes)} ({covers})"
    if not fitting:
        return f"none of {len(tried)} sizes fits in {binary(limit_bytes)}"
    return f"{len(fitting)} of {len(tried)} sizes fit in {binary(limit_bytes)}"


def _bar(needed: int, limit_bytes: int | None, most: int) -> str:
    """Draw the needed bytes as a bar of blocks, with the limit marked by a line."""
    filled = round(_BAR * needed / max(most, 1))
    cells = ["#" if k < filled else " " for k in range(_BAR)]
    if limit_bytes is not None:
        cells.insert(min(round(_BAR * limit_bytes / max(most, 1)), _BAR), "|")
    return "".join(cells).rstrip()
