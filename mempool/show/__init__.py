"""Pictures of traces and plans: a self-contained page, a notebook figure, a file for Perfetto.

The import only defines names; Bokeh is imported when a figure is drawn.
"""

from mempool.show.figure import Figure, figure
from mempool.show.perfetto import write_perfetto
from mempool.show.scene import Scene, scene_of
from mempool.show.timeline import Timeline
from mempool.show.view import Segments, View

__all__ = [
    "Figure",
    "Scene",
    "Segments",
    "Timeline",
    "View",
    "figure",
    "scene_of",
    "write_perfetto",
]
