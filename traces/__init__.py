"""Traces: the events of a program, the buffers that these events define, and files of both.

Depends on no solver and no pool. The import only defines names; the functions that read and write Parquet
import pyarrow.
"""

from traces.buffers import Buffers, buffers_of
from traces.errors import TraceError
from traces.trace import EventType, Trace

__all__ = ["Buffers", "EventType", "Trace", "TraceError", "buffers_of"]
