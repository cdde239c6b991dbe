"""Bokeh figure: plots of the load and of buffers over time, and the script that fills them."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.show.content import content_of
from mempool.show.packed_columns import clean
from mempool.show.scene import scene_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.show.scene import Scene
    from solvers import Plan
    from traces import Buffers, Trace


ASSETS = Path(__file__).parent / "assets"
#: Scripts of the figure, in order of dependency.
_SCRIPTS = (
    "unpack.js",
    "scene.js",
    "numbers.js",
    "text.js",
    "owners.js",
    "search.js",
    "colours.js",
    "raster.js",
    "stack.js",
    "notes.js",
    "tooltip.js",
    "viewport.js",
    "pictures.js",
    "theme.js",
    "load.js",
    "plots.js",
    "start.js",
)
_REFUSED = "#e5384f"  #: red in light and in dark


@dataclass(frozen=True)
class Figure:
    """A drawn scene, for a notebook or as a page.

    Attributes:
        scene: the scene to show.
        frames: true to include source lines.
    """

    scene: Scene
    frames: bool = False

    def model(self) -> Any:
        """Return a new Bokeh layout, for `bokeh.io.show` and other consumers of layouts.

        Raises:
            ModuleNotFoundError: Bokeh is not installed.
        """
        return _layout(content_of(self.scene, frames=self.frames)[0])

    def html(self) -> str:
        """Return the page, which is self-contained.

        Raises:
            ModuleNotFoundError: Bokeh is not installed.
        """
        return self.page()[0]

    def page(self) -> tuple[str, dict[str, int]]:
        """Return the page, with the numbers of ``pieces`` and of separately ``drawn`` pieces.

        Raises:
            ModuleNotFoundError: Bokeh is not installed.
        """
        from mempool.show.figure import render_page

        packed, counts = content_of(self.scene, frames=self.frames)
        return render_page(self.scene.title, _layout(packed)), counts

    def _repr_html_(self) -> str:
        """Return the page in an iframe, separate from the notebook's styles and keys."""
        from mempool.show.figure import render_iframe

        return render_iframe(self.html())


def figure(
    what: Trace | Buffers,
    *,
    plan: Plan | None = None,
    allocators: Sequence[str] = (),
    frames: bool = False,
    title: str = "mempool",
) -> Figure:
    """Draw load and addresses over time, for a notebook.

    Args:
        what: a trace, or buffers.
        plan: a plan for these buffers, with offsets.
        allocators: as for `scene_of`.
        frames: include source lines in tooltips.
        title: one line.

    Raises:
        TraceError, ValueError: as for `scene_of`.
    """
    return Figure(scene_of(what, plan=plan, allocators=allocators, title=title), frames)


def _layout(packed: str) -> Any:
    from bokeh.layouts import column
    from bokeh.models import CustomJS, PanTool, RangeTool, WheelZoomTool

    load = _plot("load", 170, "load")
    addresses = _plot("addresses", 460, "addresses")
    addresses.add_tools(pan := PanTool(), wheel := WheelZoomTool())
    addresses.toolbar.active_drag, addresses.toolbar.active_scroll = pan, wheel
    brush = RangeTool(x_range=addresses.x_range, start_gesture="pan")
    brush.overlay.update(fill_color="#0072b2", fill_alpha=0.15, line_color="#0072b2")
    load.add_tools(brush)
    strip = _strip(addresses.x_range)
    sources = _draw_load(load) | _draw_strip(strip) | _draw_refused(load, addresses)
    sources |= _draw_addresses(addresses, sources["reserved"])
    code = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    arguments = {"packed": packed, "load": load, "strip": strip, "addresses": addresses, **sources}
    start = CustomJS(args=arguments, code=code)
    addresses.js_on_change("inner_width", start)  # set by the layout and by resizes
    return column(load, strip, addresses, sizing_mode="stretch_width")


def _plot(name: str, height: int, label: str) -> Any:
    from bokeh.models import AdaptiveTicker, CustomJSTickFormatter, Range1d
    from bokeh.plotting import figure as bokeh_figure

    plot = bokeh_figure(
        name=name, height=height, sizing_mode="stretch_width", tools="", toolbar_location=None,
        x_range=Range1d(0, 1), y_range=Range1d(0, 1), y_axis_label=label, lod_threshold=None,
        min_border_left=90,
    )  # fmt: skip
    plot.yaxis.ticker = AdaptiveTicker(
        base=1024, mantissas=[2**k for k in range(10)], min_interval=1, num_minor_ticks=0
    )
    plot.xaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], min_interval=1)  # events are whole numbers
    plot.yaxis.formatter = CustomJSTickFormatter(code=(ASSETS / "bytes.js").read_text(encoding="utf-8"))
    plot.xaxis.formatter = CustomJSTickFormatter(code="return tick.toLocaleString('en-US')")
    return plot


def _strip(times: Any) -> Any:
    """Return the plot of marks and ranges between the two other plots: rows without axes."""
    from bokeh.models import Range1d
    from bokeh.plotting import figure as bokeh_figure

    plot = bokeh_figure(
        name="strip", height=40, sizing_mode="stretch_width", tools="", toolbar_location=None,
        x_range=times, y_range=Range1d(-1, 1), min_border_left=90, min_border_top=0, min_border_bottom=0,
        lod_threshold=None, visible=False,
    )  # fmt: skip
    plot.axis.visible = False
    plot.grid.visible = False
    return plot


def _draw_strip(plot: Any) -> dict[str, Any]:
    from bokeh.models import ColumnDataSource

    ranges = ColumnDataSource({"left": [], "right": [], "bottom": [], "top": [], "colour": []})
    marked = ColumnDataSource({"time": []})
    named = ColumnDataSource({"time": [], "row": [], "text": []})
    plot.quad(source=ranges, fill_color="colour", fill_alpha=0.35, line_color="colour")
    plot.segment("time", 0.05, "time", 0.95, source=marked, line_color="#888888", line_width=2)
    texts = plot.text("time", "row", "text", source=named, text_font_size="11px", text_baseline="middle")
    return {"ranges": ranges, "marked": marked, "named": texts}


def _draw_refused(load: Any, addresses: Any) -> dict[str, Any]:
    """Draw a line for each refused request, from the live bytes upwards by the requested bytes."""
    from bokeh.models import ColumnDataSource, LabelSet

    columns: dict[str, list[int]] = {"time": [], "low": [], "high": []}
    refused, below = ColumnDataSource(dict(columns)), ColumnDataSource(dict(columns))
    for plot, source in ((load, refused), (addresses, below)):
        plot.segment(
            "time", "low", "time", "high", source=source, line_color=_REFUSED, line_width=2, level="overlay"
        )
        plot.scatter(
            "time",
            "low",
            source=source,
            marker="x",
            size=10,
            line_color=_REFUSED,
            line_width=3,
            level="overlay",
        )
    text = ColumnDataSource({"time": [], "bytes": [], "text": [], "align": [], "beside": []})
    label = LabelSet(
        x="time", y="bytes", text="text", source=text, text_align="align", x_offset="beside", y_offset=-16,
        text_font_size="12px", text_color=_REFUSED,
    )  # fmt: skip
    load.add_layout(label)
    return {"refused": refused, "refused_label": text, "refused_below": below}


def _draw_load(plot: Any) -> dict[str, Any]:
    from bokeh.models import ColumnDataSource, LabelSet, Span

    curve = ColumnDataSource({"time": [], "bytes": []})
    reserved = ColumnDataSource({"time": [], "bytes": []})
    peak = ColumnDataSource({"time": [], "bytes": [], "text": [], "align": [], "beside": []})
    plot.varea(x="time", y1=0, y2="bytes", source=curve, fill_color="#56b4e9", fill_alpha=0.5)
    plot.line("time", "bytes", source=curve, line_color="#0072b2")
    plot.line("time", "bytes", source=reserved, line_color="#d55e00", line_dash="dashed", line_width=1.5)
    plot.scatter("time", "bytes", source=peak, marker="inverted_triangle", size=11, color="#d55e00")
    label = LabelSet(
        x="time", y="bytes", text="text", source=peak, text_align="align", x_offset="beside", y_offset=5,
        text_font_size="12px", background_fill_alpha=0.7,
    )  # fmt: skip
    moment = Span(dimension="height", line_color="#d55e00", line_dash="dotted", location=0)
    plot.add_layout(label)
    plot.add_layout(moment)
    return {
        "curve": curve,
        "reserved": reserved,
        "peak": peak,
        "peak_label": label,
        "moment": moment,
    }


def _draw_addresses(plot: Any, reserved: Any) -> dict[str, Any]:
    from bokeh.models import ColumnDataSource, Span

    empty: dict[str, list[int]] = {"left": [], "right": [], "bottom": [], "top": []}
    segments = ColumnDataSource(dict(empty))
    picture = ColumnDataSource(
        {"image": [np.zeros((1, 1), np.uint32)], "x": [0], "y": [0], "dw": [0], "dh": [0]}
    )
    large = ColumnDataSource({**empty, "colour": [], "row": []})
    chosen = ColumnDataSource({"time": [], "bytes": []})
    plot.quad(source=segments, fill_color="#888888", fill_alpha=0.16, line_color="#888888", line_alpha=0.7)
    plot.image_rgba(source=picture)
    plot.quad(source=large, fill_color="colour", line_color="#000000", line_alpha=0.45, line_width=0.6)
    ceiling = plot.line("time", "bytes", source=reserved, line_color="#d55e00", line_dash="dashed")
    outline = plot.patch("time", "bytes", source=chosen, fill_alpha=0, line_width=3)
    moment = Span(dimension="height", line_color="#d55e00", line_dash="dotted", location=0)
    plot.add_layout(moment)
    return {
        "segments": segments,
        "picture": picture,
        "large": large,
        "chosen": chosen,
        "outline": outline,
        "ceiling": ceiling,
        "moment_below": moment,
    }


#: Scripts of the page around the figure, in order of dependency.
_PAGE_SCRIPTS = ("numbers.js", "dom.js", "table.js", "page.js")


def render_page(title: str, layout: Any) -> str:
    """Return a page around a layout.

    Args:
        title: text of the window's title.
        layout: a Bokeh layout without text from traces.
    """
    from bokeh.embed import json_item
    from bokeh.resources import Resources

    # Text of Bokeh and of this project's files; text from traces is in the packed content.
    item = json.dumps(json_item(layout, "figure")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(clean(title)),
        "STYLE": _asset("page.css"),
        "BOKEH": Resources(mode="inline", components=["bokeh"]).render_js(),
        "ITEM": item,
        "SCRIPT": '"use strict"\n{\n' + "\n".join(map(_asset, _PAGE_SCRIPTS)) + "}",
    }
    page = _asset("page.html")
    pieces = page.split("@@")  # text, name, text, ..., text; inserted parts are not split
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def render_iframe(page: str) -> str:
    """Return a page as an iframe for another page."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:900px;border:0" '
        'title="load and addresses over time" sandbox="allow-scripts"></iframe>'
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
