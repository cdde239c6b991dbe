"""Output of ``mempool fit``: JSON, verdict and tables, and bars of a sweep."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mempool.cli.output import console, facts, plain, table
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.cli.fit.compute import SizeResult
    from mempool.torch.estimate import Fit

#: Most modules in the output, and their largest depth below the model.
MOST_MODULES, DEPTH = 8, 4
_BAR = 30


def to_json(result: SizeResult) -> dict[str, Any]:
    """Return the object of ``--json``."""
    about = {
        "model": result.title,
        "batch": result.fit.batch,
        "seq": result.seq,
        "mode": result.fit.mode,
        "device": result.fit.device,
    }
    return about | result.fit.to_dict()


def show(result: SizeResult) -> None:
    """Print all results of one job."""
    fit = result.fit
    print_line = console().print
    print_line(plain(fit.verdict))
    warnings = list(map(str, fit.caveats))
    for text in warnings:
        print_line(plain(f"warning: {text}"))
    facts("", _facts(result))
    peak = max(fit.peak_bytes, 1)
    _shares(
        "at the peak by class",
        "class",
        [(k.replace("_", " "), v) for k, v in fit.by_class_bytes.items()],
        peak,
    )
    _shares("at the peak by module", "module", modules(fit)[:MOST_MODULES], peak)
    table("\nreserved of the device, with what a GPU adds", *_allocators(fit))
    _advice(fit)
    for text in fit.warnings:
        if text not in warnings:
            print_line(plain(f"note: {text}"))


def modules(fit: Fit) -> list[tuple[str, int]]:
    """Return bytes at the peak by module, the largest first, with layers of different numbers merged."""
    found: dict[str, list[int]] = {}
    for share in fit.modules(DEPTH):
        name = re.sub(r"\.\d+(?=\.|$)", ".*", share.module) or "(no module)"
        found.setdefault(name, []).append(share.bytes)
    rows = [(f"{n} ({len(each)})" if len(each) > 1 else n, sum(each)) for n, each in found.items()]
    return sorted(rows, key=lambda row: -row[1])


def _facts(result: SizeResult) -> list[tuple[str, str]]:
    fit = result.fit
    where = f" in {fit.peak_module}" if fit.peak_module else ""
    phases = ", ".join(f"{name} {binary(size)}" for name, size in fit.by_phase_bytes.items())
    rows = [
        ("model", result.title),
        ("tried", result.tried),
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
        caveat_labels = f" ({fit.caveat_labels})" if fit.caveats else ""
        rows.append(("largest batch", largest + caveat_labels))
    return rows


def _shares(title: str, heading: str, rows: Sequence[tuple[str, int]], peak: int) -> None:
    lines = [(name, binary(size), f"{100 * size / peak:.1f} %") for name, size in rows if size]
    table(f"\n{title}", (heading, "bytes", "share"), lines)


def _allocators(fit: Fit) -> tuple[list[str], list[list[str]]]:
    added = sum(fit.margin_bytes.values())
    limited = fit.limit_bytes is not None
    lines = [
        [
            name,
            binary(size),
            binary(size + added),
            *[_fits_cell("no" if size + added > (fit.limit_bytes or 0) else "yes", fit)] * limited,
        ]
        for name, size in fit.reserved_bytes.items()
    ]
    return ["allocator", "reserved", "in all", *["fits"] * limited], lines


def _fits_cell(to_json: str, fit: Fit) -> str:
    """Return the cell of a row's verdict: "?" instead of "yes" if there are caveats."""
    return "?" if fit.caveats and to_json == "yes" else to_json


def _advice(fit: Fit) -> None:
    if fit.advice is None:
        return
    print_line = console().print
    if fit.remedies:
        print_line("\nwhat would help")
    for remedy in fit.remedies:
        if 200 * remedy.saves_bytes >= fit.peak_bytes:
            fits = ", and it fits" if remedy.fits else ""
            print_line(plain(f"  {remedy.name}: saves {binary(remedy.saves_bytes)}{fits}; {remedy.how}"))
            _code(remedy.code)
    combined = fit.advice.cheapest or fit.advice.combined
    if combined is not None:
        enough = f"the cheapest that makes {'this much' if fit.caveats else 'it'} fit"
        heading = enough if fit.advice.cheapest else "all of it, which is not enough"
        print_line(plain(f"\n{heading}: {combined.name}; {combined.how}"))
        _code(combined.code)
    for name, why in fit.advice.not_tried:
        print_line(plain(f"not tried: {name}, {why}"))
    for hint in fit.advice.hints:
        print_line(plain(f"hint: {hint}"))


def _code(code: str) -> None:
    for line in code.splitlines():
        console().print(plain(f"      {line}"))


def show_sweep(results: Sequence[SizeResult], limit_bytes: int | None) -> None:
    """Print a row for each size, with a bar of the needed bytes."""
    if limit_bytes is not None:
        console().print(plain(_summary(results, limit_bytes)))
    first = list(map(str, results[0].fit.caveats))
    for text in first:
        console().print(plain(f"warning: {text}"))
    most = max(max(result.fit.needed_bytes for result in results), limit_bytes or 0)
    columns = ["seq"] if any(result.seq for result in results) else []
    header = [*columns, "batch", "peak load", "reserved", "in all", *["fits"] * (limit_bytes is not None), ""]
    lines = [
        [
            *(f"{result.seq or 0:,}" for _ in columns),
            f"{result.fit.batch:,}",
            binary(result.fit.peak_bytes),
            binary(result.fit.reserved_bytes[result.fit.allocator]),
            binary(result.fit.needed_bytes),
            *[_fits_cell("no" if result.fit.fits is False else "yes", result.fit)]
            * (limit_bytes is not None),
            _bar(result.fit.needed_bytes, limit_bytes, most),
        ]
        for result in results
    ]
    table(
        f"{results[0].title}, {results[0].fit.mode}, {results[0].fit.allocator}",
        header,
        lines,
        fold=len(header) - 1,
    )
    for text in dict.fromkeys(text for result in results for text in result.fit.warnings):
        if text not in first:
            console().print(plain(f"note: {text}"))


def _summary(results: Sequence[SizeResult], limit_bytes: int) -> str:
    fitting = [result for result in results if result.fit.fits is not False]
    if fitting and (caveat_labels := fitting[0].fit.caveat_labels):
        known = f"not known whether {len(fitting)} of {len(results)} sizes fit"
        return f"{known} in {binary(limit_bytes)} ({caveat_labels})"
    if not fitting:
        return f"none of {len(results)} sizes fits in {binary(limit_bytes)}"
    return f"{len(fitting)} of {len(results)} sizes fit in {binary(limit_bytes)}"


def _bar(needed: int, limit_bytes: int | None, most: int) -> str:
    """Draw the needed bytes as a bar of blocks, with the limit marked by a line."""
    filled = round(_BAR * needed / max(most, 1))
    cells = ["#" if k < filled else " " for k in range(_BAR)]
    if limit_bytes is not None:
        cells.insert(min(round(_BAR * limit_bytes / max(most, 1)), _BAR), "|")
    return "".join(cells).rstrip()
