"""HTML page: Bokeh's script, the figure, controls around the figure, and a policy against any loading."""

from __future__ import annotations

import html
import json
from typing import Any

from mempool.show.figure import ASSETS
from mempool.show.packed_columns import clean

#: Scripts of the page around the figure, in order of dependency.
_SCRIPTS = ("numbers.js", "dom.js", "table.js", "link.js", "page.js")


def page_of(title: str, layout: Any) -> str:
    """Return a page around a layout.

    Args:
        title: text of the window's title.
        layout: a Bokeh layout, whose texts are this project's own.
    """
    from bokeh.embed import json_item
    from bokeh.resources import Resources

    # Text that comes only from Bokeh and the page's own files; text from traces is in the packed content.
    item = json.dumps(json_item(layout, "figure")).replace("<", "\\u003c")
    parts = {
        "TITLE": html.escape(clean(title)),
        "STYLE": _asset("page.css"),
        "BOKEH": Resources(mode="inline", components=["bokeh"]).render_js(),
        "ITEM": item,
        "SCRIPT": '"use strict"\n{\n' + "\n".join(map(_asset, _SCRIPTS)) + "}",
    }
    page = _asset("page.html")
    pieces = page.split("@@")  # text, name, text, name, ..., text: inserted parts are not split again
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def framed(page: str) -> str:
    """Return a page as an iframe for another page."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width:100%;height:900px;border:0" '
        'title="load and addresses over time" sandbox="allow-scripts"></iframe>'
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
