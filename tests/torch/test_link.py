"""Links computed from measured copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.torch.offload.link import SIZES, fit_line, measure

FIXED = st.floats(0, 1e-2)
PER_BYTE = st.floats(1e-13, 1e-6)


class Clockwork:
    """An engine whose copies take the times of a link, except that each third takes much longer."""

    def __init__(self, out: tuple[float, float], back: tuple[float, float], duplex: bool) -> None:
        self._ways, self._duplex, self._count = (out, back), duplex, 0

    def timed(self, size: int, *, out: bool, back: bool) -> float:
        self._count += 1
        times = [a + b * size for (a, b), asked in zip(self._ways, (out, back), strict=True) if asked]
        return (max(times) if self._duplex else sum(times)) * (10 if self._count % 3 == 0 else 1)


@given(FIXED, PER_BYTE, FIXED, PER_BYTE, st.booleans())
def test_fitted_link_ignores_outliers(
    out_fixed: float, out_per_byte: float, in_fixed: float, in_per_byte: float, duplex: bool
) -> None:
    link = measure(Clockwork((out_fixed, out_per_byte), (in_fixed, in_per_byte), duplex))
    for size in SIZES:
        assert link.out_fixed + link.out_per_byte * size == pytest.approx(out_fixed + out_per_byte * size)
        assert link.in_fixed + link.in_per_byte * size == pytest.approx(in_fixed + in_per_byte * size)
    assert link.duplex == duplex


@given(st.lists(st.floats(1e-7, 10), min_size=2, max_size=8))
def test_fit_is_nonnegative_and_optimal(seconds: list[float]) -> None:
    sizes = SIZES[: len(seconds)]
    seconds = seconds[: len(sizes)]

    def off(a: float, b: float) -> float:
        return sum(((a + b * s) / t - 1) ** 2 for s, t in zip(sizes, seconds, strict=True))

    fixed, per_byte = fit_line(sizes, seconds)
    assert fixed >= 0
    assert per_byte >= 0
    for a, b in ((0.9, 1.0), (1.1, 1.0), (1.0, 0.9), (1.0, 1.1)):
        assert off(fixed, per_byte) <= off(a * fixed, b * per_byte) * (1 + 1e-6) + 1e-9
    assert off(fixed, per_byte) <= off(fixed + min(seconds) / 100, per_byte) * (1 + 1e-6) + 1e-9
