"""Guards of the core by name, and the harness that fails without each: see mempool/native/core/guards.hpp."""

from __future__ import annotations

#: tests/native/stress.cpp, on the machine's own threads.
STRESS = [
    "planned_slots",
    "unplanned_ranges",
    "hole",
    "arena_end",
    "own_size",
    "lock",
    "fork",
]
_ALWAYS = [
    *("planned_slots", "unplanned_ranges", "hole", "arena_end", "own_size", "stream", "wait", "fork"),
    *("hold", "record_stream", "graph", "replays", "resize_shared", "vain_wait"),
    *(
        "arena_stream",
        "first_clock",
        "early_event",
        "undistinguished",
        "failed_wait",
        "stream_index",
        "prefetch_end",
    ),
]
#: tests/native/world.cpp, by guard: in which modes. Whole calls never meet, so they miss no lock; only where
#: threads take turns do programs wait for a use by another stream after the free.
WORLD: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALWAYS, ("whole", "inside")),
    "lock": ("inside",),
    "late_order": ("whole",),
    "renamed": ("inside",),
}
