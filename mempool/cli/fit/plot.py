"""Self-contained SVG drawing of a ``mempool fit`` sweep: the bytes needed at each size, and the limit."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.cli.fit.compute import SizeResult

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 150, 50, 60
#: Colours that colour-blind readers can distinguish (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 14px sans-serif; margin: 2em; background: #fff; color: #222 }}
td, th {{ padding: 2px 12px; text-align: right }}</style></head>
<body>{drawing}{table}</body></html>
"""


def draw(results: Sequence[SizeResult], *, page: bool) -> str:
    """Draw the bytes needed over the batch, or over the first varying size; the other sizes each get a line.

    Args:
        results: the sizes.
        page: return an HTML page with the numbers below the drawing; else only the SVG.
    """
    drawing = _svg(results)
    if not page:
        return drawing
    return _PAGE.format(title=_text(results[0].title), drawing=drawing, table=_table(results))


def _svg(results: Sequence[SizeResult]) -> str:
    axis, other_sizes = _axes(results)
    xs = sorted({size_of(result, axis) for result in results})
    limit = results[0].fit.limit_bytes
    top = max(*(result.fit.needed_bytes for result in results), limit or 0, 1) * 1.05
    scale = _Scale(xs, top)
    parts = [_grid(scale, xs, axis, top)]
    if limit is not None:
        y = scale.y(limit)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#c00" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="{_LEFT + 6}" y="{y - 5:.1f}" fill="#c00">{binary(limit)}</text>')
    lines: dict[tuple[int, ...], list[SizeResult]] = {}
    for result in results:
        lines.setdefault(tuple(size_of(result, name) for name in other_sizes), []).append(result)
    for at, (key, series) in enumerate(lines.items()):
        colour = _COLOURS[at % len(_COLOURS)]
        series.sort(key=lambda result: size_of(result, axis))
        parts.append(_line(scale, series, axis, colour))
        label = ", ".join(f"{name} {value:,}" for name, value in zip(other_sizes, key, strict=True))
        x, y = _WIDTH - _RIGHT + 6, _TOP + 30 + 18 * at
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{_text(label)}</text>')
    title = _text(f"{results[0].title}, {results[0].fit.mode}: memory needed with {results[0].fit.allocator}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12"><rect width="100%" height="100%" '
        f'fill="#fff"/><text x="{_LEFT}" y="24" font-size="14">{title}</text>{"".join(parts)}</svg>\n'
    )


def size_of(result: SizeResult, name: str) -> int:
    """Return the batch, seq or image of a job; 0 where the job has none."""
    found = {"batch": result.fit.batch, "seq": result.seq, "image": result.image}[name]
    return found or 0


def _axes(results: Sequence[SizeResult]) -> tuple[str, list[str]]:
    varying = [n for n in ("batch", "seq", "image") if len({size_of(result, n) for result in results}) > 1]
    return (varying or ["batch"])[0], varying[1:]


class _Scale:
    """Map from sizes and bytes to coordinates; sizes that span a factor of 8 or more have a log scale."""

    def __init__(self, xs: list[int], top: float) -> None:
        self.log = xs[0] > 0 and xs[-1] >= 8 * xs[0]
        self.low, self.high = self._of(xs[0]), self._of(xs[-1])
        self.top = top

    def _of(self, value: int) -> float:
        return math.log2(value) if self.log else float(value)

    def x(self, value: int) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        span = self.high - self.low
        return _LEFT + width * ((self._of(value) - self.low) / span if span else 0.5)

    def y(self, size: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * size / self.top


def _grid(scale: _Scale, xs: list[int], axis: str, top: float) -> str:
    step = 2 ** math.ceil(math.log2(max(top, 1) / 6))
    bottom, parts = _HEIGHT - _BOTTOM, []
    for k in range(int(top // step) + 1):
        y = scale.y(k * step)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{binary(k * step)}</text>')
    parts += [f'<text x="{scale.x(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:,}</text>' for x in xs]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">{axis}</text>')
    return "".join(parts)


def _line(scale: _Scale, series: list[SizeResult], axis: str, colour: str) -> str:
    points = [(scale.x(size_of(result, axis)), scale.y(result.fit.needed_bytes)) for result in series]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
        f"<title>{_text(_tooltip(result))}</title></circle>"
        for (x, y), result in zip(points, series, strict=True)
    )
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>{dots}'


def _tooltip(result: SizeResult) -> str:
    sizes = ", ".join(f"{n} {size_of(result, n):,}" for n in ("batch", "seq", "image") if size_of(result, n))
    return f"{sizes}: peak load {binary(result.fit.peak_bytes)}, needs {binary(result.fit.needed_bytes)}"


def _table(results: Sequence[SizeResult]) -> str:
    names = [n for n in ("batch", "seq", "image") if any(size_of(result, n) for result in results)]
    head = "".join(f"<th>{name}</th>" for name in (*names, "peak load", "reserved", "in all"))
    rows = []
    for result in results:
        fit = result.fit
        cells = [f"{size_of(result, name):,}" for name in names]
        cells += map(binary, (fit.peak_bytes, fit.reserved_bytes[fit.allocator], fit.needed_bytes))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _text(text: str) -> str:
    return html.escape(text.encode("utf-8", "backslashreplace").decode())
