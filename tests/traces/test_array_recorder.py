"""Recording of NumPy's arrays: accesses and lifetimes of buffers, without changing any result."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import array_programs
import numpy as np
import pytest
from array_calls import CALLS, same_kind
from hypothesis import given

from mempool.demo.network import Data, Network
from mempool.recording.arrays import ArrayRecorder
from mempool.recording.arrays.numpy_arrays import RecordedArray
from traces import EventType, Trace, TraceError, buffers_of

LETTERS = {
    EventType.ALLOC: "A",
    EventType.FREE: "F",
    EventType.READ: "R",
    EventType.WRITE: "W",
    EventType.MARK: "M",
}


def events(trace: Trace) -> list[tuple[str, int, str]]:
    trace.validate()
    names = (*trace.names, "")
    return [
        (LETTERS[EventType(kind)], buffer, names[operation])
        for kind, buffer, operation in zip(
            trace.kind.tolist(), trace.buffer.tolist(), trace.operation.tolist(), strict=True
        )
    ]


def recorded(work: Callable[[ArrayRecorder], object]) -> list[tuple[str, int, str]]:
    with ArrayRecorder() as recorder:
        kept = work(recorder)
        trace = recorder.trace()
        del kept
    return events(trace)


def watch(recorder: ArrayRecorder, *sizes: int) -> list[Any]:
    return [recorder.watch(np.arange(float(size))) for size in sizes]


class TestAgainstTheModel:
    @given(array_programs.programs())
    def test_accesses_of_random_programs_match_the_model(self, program: list[Any]) -> None:
        """Ufuncs, views, slices, in-place operations, reductions: the same events, in the same order."""
        model = array_programs.Model(array_programs.start())
        model.run(program)
        with ArrayRecorder() as recorder:
            arrays = [recorder.watch(one) for one in array_programs.start()]
            array_programs.run(program, arrays)
            found = events(recorder.trace())
        assert found == model.events


class TestOutputs:
    def test_positional_output_is_written_and_not_read(self) -> None:
        """Covers functions, ufuncs, and outputs that are also operands, watched or plain."""

        def work(recorder: ArrayRecorder) -> None:
            one, out = watch(recorder, 2, 2)
            plain = np.ones(2)
            np.cumsum(one, 0, None, out)
            np.add(one, 1, out)
            recorder.module(np).add(plain, one, plain)
            given = plain
            plain += one
            assert np.add(one, plain, out=plain) is plain is given

        accesses = [event[:2] for event in recorded(work) if event[0] in "RW"]
        assert accesses[:4] == [("R", 0), ("W", 1)] * 2
        assert accesses[4:10] == [("R", 2), ("R", 0), ("W", 2)] * 2
        assert accesses[10:] == [("R", 0), ("R", 2), ("W", 2)]


class TestBuffers:
    def test_buffer_size_is_the_size_of_the_owner(self) -> None:
        with ArrayRecorder() as recorder:
            whole = np.zeros((4, 1000))
            part = recorder.watch(whole[1, :10])
            assert recorder.trace().size.tolist() == [32000]
            assert part.base is not None

    @pytest.mark.parametrize("make", [lambda: mmap.mmap(-1, 64), lambda: bytearray(64), lambda: bytes(64)])
    def test_memory_of_other_objects_is_a_single_buffer(self, make: Callable[[], Any]) -> None:
        """The buffer lives while an array lies in this memory; results are in other buffers."""
        with ArrayRecorder() as recorder:
            memory = make()
            one, other = (recorder.watch(np.frombuffer(memory, "f8", 4, at)) for at in (0, 32))
            made = one + other
            assert events(recorder.trace()) == [
                ("A", 0, ""),
                ("A", 1, "add"),
                ("R", 0, "add"),
                ("W", 1, "add"),
            ]
            assert recorder.trace().size[0] in (32, 64)  # an owner of unknown size: that of the first array
            del one, other, memory, made
        assert {event[1] for event in events(recorder.trace()) if event[0] == "F"} == {0, 1}

    def test_memory_maps_shuffles_and_objects_are_recorded(self, tmp_path: Path) -> None:
        def work(recorder: ArrayRecorder) -> None:
            mapped = recorder.watch(np.memmap(tmp_path / "file", "f4", "w+", shape=(16,)))
            holder = recorder.watch(np.empty(2, "O"))
            mapped[2:4] = 5
            recorder.module(np).random.default_rng(3).shuffle(mapped)
            holder[0] = mapped
            assert holder[0] is mapped  # the very object

        found = [event[::2] for event in recorded(work) if event[1] == 0 and event[0] in "RW"]
        assert found[:3] == [("W", "__setitem__"), ("R", "shuffle"), ("W", "shuffle")]

    def test_data_of_masked_arrays_is_watched(self) -> None:
        with ArrayRecorder() as recorder:
            masked = recorder.watch(np.ma.array([1.0, 2, 3], mask=[0, 1, 0], fill_value=7))
            made = masked * 2
            assert made.tolist() == [2, None, 6]
            assert masked.fill_value == 7
            assert {"multiply"} <= {event[2] for event in events(recorder.trace())}

    def test_another_subclass_is_refused(self) -> None:
        with ArrayRecorder() as recorder, pytest.raises(TypeError, match="a recarray cannot be watched"):
            recorder.watch(np.rec.array([(1, 2.0)]))

    def test_containers_are_watched_inside(self) -> None:
        with ArrayRecorder() as recorder:
            watched = recorder.watch({"a": [np.zeros(2), 5], "b": (np.ones(1), "text")})
        assert type(watched["a"][0]) is RecordedArray
        assert watched["a"][1] == 5
        assert type(watched["b"][0]) is RecordedArray

    def test_after_the_block_arrays_are_plain_again(self) -> None:
        with ArrayRecorder() as recorder:
            watched = recorder.watch(np.ones(3))
        before = len(recorder.trace())
        assert type(watched + 1) is np.ndarray
        watched += 1
        assert watched.tolist() == [2, 2, 2]
        assert type(watched) is RecordedArray
        del watched
        assert len(recorder.trace()) == before


class TestHonesty:
    @pytest.mark.parametrize(
        "take",
        [
            lambda a: np.asarray(a),
            lambda a: np.ascontiguousarray(a),
            lambda a: np.array(a, copy=False),
            lambda a: np.require(a, requirements="C"),
            lambda a: a.view(np.ndarray),
            lambda a: a.view(np.matrix),
            lambda a: a.__array__(),
            lambda a: a.ctypes.data,
            lambda a: a.__array_interface__,
            lambda a: a.data,
            lambda a: a.flat,
        ],
    )
    def test_plain_view_counts_as_escape_and_read(self, take: Callable[[Any], Any]) -> None:
        with ArrayRecorder() as recorder:
            (watched,) = watch(recorder, 4)
            take(watched)
            assert recorder.escaped == 1
            take(watched)
            assert recorder.escaped == 1
        trace = recorder.trace()
        assert trace.metadata["accesses"] == "partial"
        assert trace.metadata["escaped_buffers"] == "1"
        assert ("R", 0, "escape") in events(trace)

    def test_copies_do_not_escape(self) -> None:
        with ArrayRecorder() as recorder:
            (watched,) = watch(recorder, 4)
            copies = (
                np.array(watched),
                np.asarray(watched, "f4"),
                watched.astype("i8"),
                np.asanyarray(watched),
            )
            assert {type(one) for one in copies} == {RecordedArray}
        assert recorder.trace().metadata["accesses"] == "watched"

    def test_numpy_functions_are_restored(self) -> None:
        before = [getattr(np, name) for name in ("array", "asarray", "require")]
        with pytest.raises(KeyError), ArrayRecorder():
            raise KeyError
        assert [getattr(np, name) for name in ("array", "asarray", "require")] == before

    def test_arrays_of_unknown_origin_are_counted_as_late(self) -> None:
        with ArrayRecorder() as recorder:
            (watched,) = watch(recorder, 3)
            watched + np.ones(3)
        assert recorder.trace().metadata["late_buffers"] == "1"

    def test_declared_accesses_are_recorded(self) -> None:
        def work(recorder: ArrayRecorder) -> None:
            one, other = watch(recorder, 3, 4)
            recorder.touch(one, write=True, name="solve")
            recorder.touch([one, other], read=False, write=True)

        assert recorded(work)[2:6] == [
            ("R", 0, "solve"),
            ("W", 0, "solve"),
            ("W", 0, "touch"),
            ("W", 1, "touch"),
        ]

    def test_declared_function_gets_plain_arrays(self) -> None:
        def outside(one: Any, other: Any) -> Any:
            assert type(one) is type(other) is np.ndarray
            other[:] = one
            return one * 2

        def work(recorder: ArrayRecorder) -> Any:
            one, other = watch(recorder, 3, 3)
            made = recorder.calls(outside, writes=[1])(one, other)
            assert type(made) is RecordedArray
            recorder.calls(outside)(one, other)
            return made

        accesses = [event[:2] for event in recorded(work) if event[0] in "RW"]
        assert [buffer for kind, buffer in accesses if kind == "R"] == [0, 1, 0, 1]
        assert [buffer for kind, buffer in accesses if kind == "W"] == [1, 2, 0, 1, 3]


class TestWhatPeopleSay:
    def test_marks_steps_and_categories_are_recorded(self) -> None:
        with ArrayRecorder() as recorder:
            weights = watch(recorder, 3, 4)
            recorder.own("parameters", weights)
            recorder.mark("forward")
            recorder.step()
        trace = recorder.trace()
        assert [trace.names[at] for at in trace.category[:2]] == ["parameters"] * 2
        assert [event[2] for event in events(trace) if event[0] == "M"] == ["forward", "step"]

    def test_events_of_an_operation_share_a_time(self) -> None:
        """The next operation has a later time: a trace can be cut into operations."""
        with ArrayRecorder() as recorder:
            (given,) = watch(recorder, 1000)
            kept = [given + 1, given * 2]
            trace = recorder.trace()
        times = trace.time_ns[1:]
        assert len(set(times[:3].tolist())) == len(set(times[3:].tolist())) == 1
        assert times[0] < times[3]
        assert len(kept) == 2

    def test_source_lines_of_the_program_are_recorded_on_demand(self) -> None:
        lines = []
        for frames in (False, True):
            with ArrayRecorder(frames=frames) as recorder:
                watch(recorder, 3)[0].sum()
            trace = recorder.trace()
            lines.append([trace.names[at] if at >= 0 else "" for at in trace.frame])
        assert set(lines[0]) == {""}
        assert all(__file__ in line for line in lines[1])

    def test_second_active_recorder_is_refused(self) -> None:
        with ArrayRecorder(), pytest.raises(TraceError, match="already"):
            ArrayRecorder().__enter__()
        with ArrayRecorder():
            pass

    def test_threads_are_recorded_separately(self) -> None:
        """No event of a thread is lost or torn by another thread."""
        together = threading.Barrier(4)

        def work(mine: Any) -> None:
            together.wait()
            for _ in range(300):
                mine = (mine + 1)[1:]
                mine = np.concatenate([mine, mine[:1]])

        with ArrayRecorder() as recorder:
            threads = [threading.Thread(target=work, args=watch(recorder, 5)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            del threads, thread
            gc.collect()
        trace = recorder.trace()
        trace.validate()
        assert len(set(trace.thread.tolist())) == 5
        assert (trace.kind == EventType.WRITE).sum() == 4 * 600
        assert (trace.kind == EventType.FREE).sum() == (trace.kind == EventType.ALLOC).sum()

    def test_a_forked_child_records_nothing(self) -> None:
        with ArrayRecorder() as recorder:
            (watched,) = watch(recorder, 3)
            child = os.fork()
            if child == 0:
                os._exit(type(watched + 1) is not np.ndarray)
            assert os.waitpid(child, 0)[1] == 0
            assert type(watched + 1) is RecordedArray


class TestAModule:
    def test_program_over_a_recorded_module_is_recorded_completely(self) -> None:
        """The demo's network: same bits, every buffer known from the beginning, and a repeating pattern."""

        def train(xp: Any, step: Callable[[], None]) -> list[Any]:
            network, data = Network(xp, layers=(784, 20, 10)), Data(xp)
            losses = []
            for _ in range(3):
                losses.append(network.step(*data.batch()))
                step()
            return [losses, *network.parameters, *network.square]

        plain = train(np, lambda: None)
        with ArrayRecorder() as recorder:
            watched = train(recorder.module(np), recorder.step)
        trace = recorder.trace()
        assert [same_kind(one) for one in watched] == [same_kind(one) for one in plain]
        assert (trace.metadata["accesses"], trace.metadata["late_buffers"]) == ("watched", "0")
        accessed = set(
            trace.buffer[(trace.kind == EventType.READ) | (trace.kind == EventType.WRITE)].tolist()
        )
        assert accessed == set(trace.buffer[trace.kind == EventType.ALLOC].tolist())
        steps = np.flatnonzero(trace.kind == EventType.MARK)
        second = trace.kind[steps[0] + 1 : steps[1]], trace.operation[steps[0] + 1 : steps[1]]
        third = trace.kind[steps[1] + 1 : steps[2]], trace.operation[steps[1] + 1 : steps[2]]
        assert np.array_equal(second, third)
        assert len(buffers_of(trace)) == (trace.kind == EventType.ALLOC).sum()


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
