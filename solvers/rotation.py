"""After how many iterations addresses should repeat, where buffers live longer than one.

``x = f(x)`` needs two addresses in turn. But of k such buffers of one size that are replaced one after the
other, each can move into the place that the one before it has just left: k + 1 places are enough, and the
addresses repeat after k + 1 iterations. With two columns the same buffers need 2 k places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from traces.buffers import Buffers

#: Rows of an unrolled problem that are still quick to pack.
_MOST_ROWS = 100_000
_MOST_COLUMNS = 32
_MOST_TRIED = 4


def columns_to_try(buffers: Buffers) -> list[int]:
    """Numbers of columns, the most promising first; `Buffers.max_instances` is always among them."""
    least = buffers.max_instances
    if least == 1 or (buffers.offset >= 0).any():
        return [least]
    longer = ~buffers.persistent & (buffers.instances > 1)
    sizes, count = np.unique(buffers.size[longer], return_counts=True)
    weight: dict[int, int] = {}
    for size, k in zip(sizes.tolist(), count.tolist(), strict=True):
        columns = max(least, k + least - 1)
        weight[columns] = weight.get(columns, 0) + size * k
    tried = sorted(weight, key=lambda columns: -weight[columns])
    most = min(_MOST_COLUMNS, max(least, _MOST_ROWS // len(buffers)))
    tried = [columns for columns in [*tried, least, least + 1, least + 2] if columns <= most]
    chosen = list(dict.fromkeys([*tried, least]))[:_MOST_TRIED]
    return chosen if least in chosen else [*chosen[:-1], least]
