"""History of a pool's memory over a program's run, and its plot."""

from __future__ import annotations

import html
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.pool import Pool

#: Most samples before each two are merged: more than a screen has columns.
MOST_SAMPLES = 4096
#: Colors that color-blind readers can distinguish (Okabe and Ito).
_COLORS = {"reserved": "#56b4e9", "live": "#d55e00", "planned": "#009e73"}


@dataclass(frozen=True)
class Sample:
    """Memory since the previous sample, in bytes.

    Attributes:
        seconds: time since the first sample.
        step: completed steps.
        live: most bytes in use.
        reserved: bytes held from the device.
        planned: arena of the plan in effect, or 0.
    """

    seconds: float
    step: int
    live: int
    reserved: int
    planned: int


class MemoryHistory:
    """Samples of a pool's memory, and the moments when plans took effect.

    Attributes:
        samples: the samples, the oldest first.
        plans: the sample at which each plan took effect.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.samples: list[Sample] = []
        self.plans: list[Sample] = []
        self._began = time.monotonic()
        self._latest_plan = 0
        self._stride = self._calls = 0

    def sample(self) -> None:
        """Add a sample; merge samples pairwise once there are too many."""
        pool, metrics = self.pool, self.pool.metrics()
        state = pool.client.state()
        new = Sample(
            time.monotonic() - self._began,
            int(metrics["steps"]),
            pool.client.take_live_peak(),
            int(metrics["reserved_bytes"]),
            int(metrics["planned_bytes"]) if state["replaying"] else 0,
        )
        latest = state["latest_plan_active_at_iteration"]
        if latest != self._latest_plan and new.planned:
            self._latest_plan = latest
            self.plans.append(new)
        self._calls += 1
        if self.samples and self._calls & ((1 << self._stride) - 1):
            new = _joint(self.samples.pop(), new)
        self.samples.append(new)
        if len(self.samples) > MOST_SAMPLES:
            self._stride += 1
            self.samples[:-1] = [
                _joint(*pair) for pair in zip(self.samples[:-1:2], self.samples[1:-1:2], strict=True)
            ]

    def plot(self) -> Any:
        """Return a Bokeh plot of the memory by step, or by time if the program has no steps."""
        from bokeh.models import AdaptiveTicker, ColumnDataSource, HoverTool, NumeralTickFormatter, Span
        from bokeh.plotting import figure

        axis = "step" if self.samples[-1].step else "seconds"
        samples: dict[float, Sample] = {}
        for sample in self.samples:
            at = getattr(sample, axis)
            samples[at] = _joint(samples.get(at, sample), sample)
        columns = {name: [getattr(sample, name) for sample in samples.values()] for name in (axis, *_COLORS)}
        columns |= {f"{name}_text": [binary(value) for value in columns[name]] for name in _COLORS}
        source = ColumnDataSource(columns)
        plot = figure(height=360, sizing_mode="stretch_width", x_axis_label=axis)
        for name, color in _COLORS.items():
            plot.step(axis, name, source=source, color=color, line_width=2, legend_label=name, mode="center")
        for moment in self.plans:
            line = {"line_dash": "dashed", "line_color": _COLORS["planned"]}
            plot.add_layout(Span(location=getattr(moment, axis), dimension="height", **line))
        tips = [(axis, f"@{axis}"), *((name, f"@{name}_text") for name in _COLORS)]
        plot.add_tools(HoverTool(tooltips=tips, mode="vline", renderers=plot.renderers[:1]))
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0] ib")
        plot.yaxis.ticker = AdaptiveTicker(base=1024, mantissas=[1 << power for power in range(10)])
        plot.y_range.start = 0
        plot.legend.location = "bottom_right"
        return plot


def page(histories: Sequence[MemoryHistory]) -> str:
    """Return a page with a plot for each pool, which needs no network."""
    from bokeh.embed import file_html
    from bokeh.layouts import column
    from bokeh.models import Div
    from bokeh.resources import INLINE

    note = (
        "<b>live</b>: most bytes in use; <b>reserved</b>: bytes held from the device; <b>planned</b>: the "
        "arena of the plan. A dashed line: a plan takes effect."
    )
    parts: list[Any] = [Div(text=note)]
    for history in histories:
        if history.samples and (report := history.pool.report()).has_work:
            parts += [Div(text=f"<b>{html.escape(report.verdict)}</b>"), history.plot()]
    return str(file_html(column(*parts, sizing_mode="stretch_width"), INLINE, title="mempool"))


def _joint(one: Sample, two: Sample) -> Sample:
    """Merge two successive samples."""
    live, reserved = max(one.live, two.live), max(one.reserved, two.reserved)
    return Sample(two.seconds, two.step, live, reserved, two.planned)
