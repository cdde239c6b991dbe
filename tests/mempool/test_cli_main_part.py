"""Main part of a trace: a layer that repeats within one iteration is not taken for the iteration."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import answer as said

from mempool.cli.app import call
from traces import EventType, Trace
from traces.formats.parquet import write_trace

A, F, _, _, M, *_ = EventType
SNAPSHOTS = Path(__file__).parents[2] / "../shared/bench/pytorch_snapshots"


def recorded(before: list[int], times: int, *, freed: bool = True, mark: bool = False) -> Trace:
    """Other allocs first, each freed by the next or never, then so many times the same ten."""
    rows: list[tuple[int, int, int]] = []
    buffer = 0
    for size in before:
        rows.append((A, buffer, size))
        if freed:
            rows.append((F, buffer, 0))
        buffer += 1
    for _ in range(times):
        if mark:
            rows.append((M, -1, 0))
        rows += [(A, buffer + k, (k + 1) * 1024) for k in range(10)]
        rows += [(F, buffer + k, 0) for k in range(10)]
        buffer += 10
    kind, ids, size = zip(*rows, strict=True)
    return Trace.of(kind, ids, size)


few = [1000 + 8 * k for k in range(20)]
many = [1000 + 8 * k for k in range(500)]


@pytest.mark.parametrize(
    ("trace", "iterations"),
    [
        (recorded(few, 40), 39),
        (recorded([*few, 60 * 1024], 40), 39),
        (recorded(many, 40), 1),  # less than half of the allocs
        (recorded([(40 << 10) + 8 * k for k in range(100)], 40), 1),  # of the bytes
        (recorded([200 * 1024], 40), 1),  # of the peak load
        (recorded([200 * 1024], 40, freed=False), 39),  # which it reaches with what stays
        (recorded(many, 40, mark=True), 39),  # whoever set marks knows
    ],
)
def test_iterations_must_be_the_main_part_of_a_trace(
    trace: Trace, iterations: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "t.trace")
    write_trace(trace, path)
    shown = said(capsys, "info", path)
    assert shown["iterations"] == iterations
    assert said(capsys, "plan", path, "-o", path + ".plan")["iterations"] == iterations
    assert said(capsys, "check", path + ".plan", path)["ok"]
    assert (shown["period"] is None) == (shown["per_device"][0]["roles"] is None) == (iterations == 1)
    assert call(["info", path]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ("alike, are a small part; what follows is all" in text) == (iterations == 1)
    for output in ([], ["-o", path + ".plan"]):
        assert call(["plan", path, *output]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert ("alike, are a small part" in text) == (iterations == 1)
        assert ("replayed by no pool" in text) == (iterations == 1 and bool(output))


@pytest.mark.parametrize("name", ["transformer_ctx128_fullstep", "transformer_medium_128_training"])
def test_layer_of_a_real_network_is_not_taken_for_an_iteration(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two recordings cover one step: no buffer alive at the end has the role passing."""
    path = SNAPSHOTS / f"{name}.pickle"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    shown = said(capsys, "info", str(path))
    assert shown["period"] is None
    assert shown["peak_load_bytes"] == shown["per_device"][0]["peak_load_bytes"]
    assert shown["per_device"][0]["roles"] is None
