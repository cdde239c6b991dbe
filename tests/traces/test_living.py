"""The table of living buffers by address, compared with a simple model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from living_model import Living as Model

from traces import TraceError
from traces._core import Living, Refused

LARGEST = 1 << 62
NUMBERS = st.integers(0, 12) | st.sampled_from([LARGEST - 3, LARGEST - 1, LARGEST])
EVENTS = st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), max_size=40)


def told(living: Living | Model, *, alloc: bool, address: int, size: int, buffer: int) -> str | int | None:
    """Return the outcome of an event: the buffer, or the reason of the refusal."""
    try:
        return living.alloc(address, size, buffer) if alloc else living.free(address, size, buffer)
    except Refused as error:
        return f"address {address:#x} is {error}"
    except TraceError as error:
        return error.reason


@given(events=EVENTS)
@settings(max_examples=250, deadline=None)
def test_living_buffers_match_the_model(events: list[tuple[bool, int, int]]) -> None:
    """Ranges touch, overlap, contain each other, are empty, and end at the last possible address."""
    living, model = Living(), Model()
    for buffer, (alloc, address, size) in enumerate(events):
        found = [told(one, alloc=alloc, address=address, size=size, buffer=buffer) for one in (living, model)]
        assert found[0] == found[1]
