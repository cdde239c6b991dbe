"""Results of programs on watched arrays: same bits, types and errors as on plain arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import array_programs
import numpy as np
import pytest
from array_calls import CALLS, same_kind
from hypothesis import given

from mempool.recording.arrays import ArrayRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = ("?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "g", "c8", "c16", "m8[s]", "S3", "U2", "O", ">f8")


@given(array_programs.programs())
def test_random_programs_give_the_same_bits(program: list[Any]) -> None:
    plain = array_programs.run(program, array_programs.start())
    with ArrayRecorder() as recorder:
        watched = array_programs.run(program, [recorder.watch(one) for one in array_programs.start()])
    assert [same_kind(one) for one in watched] == [same_kind(one) for one in plain]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
def test_common_operations_give_the_same_results(dtype: str) -> None:

    def arrays() -> list[Any]:
        numbers = np.array([[3, 0, 1], [2, 5, 4]])
        return [
            np.array(numbers % 2 if dtype == "?" else numbers).astype(dtype),
            (numbers[::-1] + 1).astype(dtype),
        ]

    def outcome(call: Callable[[Any, Any], Any], given: list[Any]) -> Any:
        with np.errstate():
            try:
                result = same_kind(call(*given))
            except Exception as error:
                result = type(error), str(error)
        return result, [same_kind(one) for one in given]

    different = []
    for at, call in enumerate(CALLS):
        plain = outcome(call, arrays())
        for which in ((0, 1), (0,), (1,)):
            given = arrays()
            with ArrayRecorder() as recorder:
                for one in which:
                    given[one] = recorder.watch(given[one])
                watched = outcome(call, given)
            recorder.trace().validate()
            if watched != plain:
                different.append((at, which, plain, watched))
    assert not different
