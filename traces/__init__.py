"""What happened: events, the buffers that follow from them, and the files that hold both.

Knows no solver and no pool. Importing it does nothing but define names; pyarrow is imported by the functions
that read and write Parquet.
"""

from traces.buffers import Buffers, buffers_of
from traces.errors import TraceError
from traces.trace import Kind, Trace

__all__ = ["Buffers", "Kind", "Trace", "TraceError", "buffers_of"]
