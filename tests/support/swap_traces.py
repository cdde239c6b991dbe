"""Made-up traces of training, with accesses, for what plans and shows swaps."""

from __future__ import annotations

from traces import EventType, Trace

MIB = 1 << 20


def training(*, marks: bool = True, layers: int = 6, accesses: bool = True) -> Trace:
    """Alike iterations: a parameter, and a buffer for each layer, written forward and read backward."""
    rows: list[tuple[int, int, int, int, int]] = [(EventType.ALLOC, 0, MIB, 0, -1)]
    count, now = 1, 0
    for _ in range(4 if marks else 12):
        if marks:
            rows.append((EventType.MARK, -1, 0, now, 2))
        first = count
        for layer in range(2 * layers):
            forward = layer < layers
            buffer = first + (layer if forward else 2 * layers - 1 - layer)
            if forward:
                rows.append((EventType.ALLOC, buffer, (8 if marks else 1 + layer) * MIB, now, 0))
            if accesses:
                rows.append((EventType.READ, 0, 0, now, 0 if forward else 1))
                rows.append(
                    (EventType.WRITE if forward else EventType.READ, buffer, 0, now, 0 if forward else 1)
                )
            now += 1_000_000
            if not forward:
                rows.append((EventType.FREE, buffer, 0, now, -1))
        count += layers
    if marks:
        rows.append((EventType.MARK, -1, 0, now, 2))
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Trace.of(
        *columns[:3],
        time_ns=columns[3],
        operation=columns[4],
        names=("forward", "backward", "step"),
        metadata={"time": "operation"},
    )
