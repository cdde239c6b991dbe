"""One HTML file: Bokeh's script, the figure, controls around it, and a policy that lets it load nothing."""

from __future__ import annotations

import html
import json
from typing import Any

from mempool.show.figure import ASSETS
from mempool.show.pack import clean

#: Of the page around the figure, in the order in which they build on each other.
_SCRIPTS = ("numbers.js", "dom.js", "table.js", "link.js", "page.js")


def page_of(title: str, layout: Any) -> str:
    """A page around a layout.

    Args:
        title: text of the window's title.
        layout: of Bokeh, whose texts are ours.
    """
    from bokeh.embed import json_item
    from bokeh.resources import Resources

    # Text that only Bokeh and the page's own files put there; what a trace says is in the packed content.
    item = json.dumps(json_item(layout, "figure")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(clean(title)),
        "STYLE": _asset("page.css"),
        "BOKEH": Resources(mode="inline", components=["bokeh"]).render_js(),
        "ITEM": item,
        "SCRIPT": '"use strict"\n{\n' + "\n".join(map(_asset, _SCRIPTS)) + "}",
    }
    page = _asset("page.html")
    pieces = page.split("@@")  # text, name, text, name, ..., text: what is put in is not looked at again
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def framed(page: str) -> str:
    """A page as a part of another one."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:900px;border:0" '
        'title="load and addresses over time" sandbox="allow-scripts"></iframe>'
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
