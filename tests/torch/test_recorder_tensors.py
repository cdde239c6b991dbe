"""Tensors of every kind under the recorder, and errors in recorded code."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from recorded import accesses, buffer_counts, event_tuples, marks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mempool.recording.torch import AccessRecorder
from traces import Trace, TraceError


def live(trace: Trace) -> list[int]:
    trace.validate()
    return trace.load().tolist()


class TestAccesses:
    def test_views_touch_nothing(self) -> None:
        with AccessRecorder() as recorder:
            x = torch.ones(4, 4)
            views = [x.view(-1), x.t(), x.reshape(16), x.detach(), x[0], x.expand(2, 4, 4), *x.unbind()]
            torch.ops.aten._unsafe_view(x, [16])  # its schema does not declare a view
            x.squeeze_().t_()
        assert len(views) == 10
        assert accesses(recorder.trace()) == [("WRITE", "aten::ones", 64)]

    def test_lists_and_out_arguments_are_written(self) -> None:
        with AccessRecorder() as recorder:
            a, out = [torch.ones(2), torch.ones(3)], torch.empty(2)
            torch._foreach_add_(a, 1)
            torch.add(a[0], a[0], out=out)
        assert accesses(recorder.trace())[2:] == [
            ("WRITE", "aten::_foreach_add_.Scalar", 8),
            ("WRITE", "aten::_foreach_add_.Scalar", 12),
            ("READ", "aten::add.out", 8),
            ("WRITE", "aten::add.out", 8),
        ]

    def test_an_operation_that_fails_leaves_nothing(self) -> None:
        with AccessRecorder() as recorder:
            x, y = torch.ones(3), torch.ones(2)
            before = len(recorder.trace())
            with pytest.raises(RuntimeError):
                torch.add(x, y)
            assert len(recorder.trace()) == before

    def test_branch_without_a_schema_reads_its_arguments(self) -> None:
        with AccessRecorder() as recorder:
            x = torch.ones(3)
            torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))
        assert ("READ", "cond", 12) in accesses(recorder.trace())
        assert ("WRITE", "cond", 12) in accesses(recorder.trace())

    def test_transforms_are_seen_below_them(self) -> None:
        with AccessRecorder() as recorder:
            x = torch.ones(3, 2)
            torch.func.vmap(lambda a: a.sin().sum())(x)
            torch.func.grad(lambda a: (a * a).sum())(x)
        trace = recorder.trace()
        assert ("READ", "aten::sin", 24) in accesses(trace)
        assert marks(trace) == ["forward", "backward"]


class TestStorages:
    def test_a_storage_that_is_resized_is_another_buffer_in_its_place(self) -> None:
        with AccessRecorder() as recorder:
            x = torch.ones(4)
            x.untyped_storage().resize_(0)
            assert live(recorder.trace())[-1] == 0  # at the free, which is no operation
            x.untyped_storage().resize_(64)
            x += 1
            y = torch.empty(0)
            torch.add(x, x, out=y)
            y.resize_(100)
        assert live(recorder.trace())[-1] == 64 + 400
        assert torch.UntypedStorage.resize_.__name__ == "resize_"
        assert not hasattr(torch.UntypedStorage.resize_, "__wrapped__")

    def test_a_tensor_that_is_set_to_another_storage_lets_its_own_go(self) -> None:
        with AccessRecorder() as recorder:
            x, y = torch.ones(4), torch.ones(7)
            y.set_(x)
            y += 1
            x.data = torch.zeros(3)
        assert Counter(live(recorder.trace()))[16 + 28] > 0
        assert live(recorder.trace())[-1] == 16 + 12

    def test_shared_memory_of_numpy_is_a_single_buffer(self) -> None:
        array = np.ones(100, np.float32)
        with AccessRecorder() as recorder:
            a, b = torch.from_numpy(array), torch.from_numpy(array)
            assert live(recorder.trace())[-1] == 400
            del a
            assert live(recorder.trace())[-1] == 400
            del b
            assert live(recorder.trace())[-1] == 0
            c = torch.from_numpy(array)
            assert live(recorder.trace())[-1] == 400
        assert buffer_counts(recorder.trace()) == {"inputs": 2}
        del c

    def test_tensors_without_memory_have_no_buffer(self) -> None:
        with AccessRecorder() as recorder:
            torch.ones(8, device="meta") * 2
            kept = torch.empty(0) + 1
        assert {size for _, _, size, *_ in event_tuples(recorder.trace())} == {0}
        assert kept.numel() == 0

    @pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch warns of prototypes and deprecated functions
    @pytest.mark.parametrize(
        ("make", "sizes"),
        [
            (lambda: torch.eye(3).to_sparse(), {48, 12}),
            (lambda: torch.eye(3).to_sparse_csr(), {32, 48, 12}),  # type: ignore[no-untyped-call]
            (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), {20}),
            (lambda: torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8), {8}),
            (lambda: torch.ones(8).as_subclass(type("Own", (torch.Tensor,), {})), {32}),
            (lambda: torch.ones(8, 8).to_mkldnn(), set()),  # its memory is not visible
        ],
    )
    def test_wrapper_tensors_are_recorded_as_their_parts(self, make: Any, sizes: set[int]) -> None:
        with AccessRecorder() as recorder:
            kept = make()
            alive = {
                buffer: size for kind, buffer, size, *_ in event_tuples(recorder.trace()) if kind == "ALLOC"
            }
            for kind, buffer, *_ in event_tuples(recorder.trace()):
                if kind == "FREE":
                    del alive[buffer]
        assert set(alive.values()) == sizes
        assert kept is not None

    def test_a_wrapper_is_taken_apart(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        with AccessRecorder() as recorder:
            both = TwoTensor(torch.ones(3), torch.ones(3))
            both.add_(1)
            recorder.own("parameters", [both])
        trace = recorder.trace()
        assert buffer_counts(trace) == {"parameters": 2}
        assert accesses(trace)[2:] == 2 * [("WRITE", "aten::add_.Tensor", 12)]

    def test_fake_mode_inside_the_recorder_is_recorded_as_a_mode_outside(self) -> None:
        def program() -> None:
            nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()

        with AccessRecorder() as inside, FakeTensorMode():
            program()
        with FakeTensorMode(), AccessRecorder() as outside:
            program()
        assert event_tuples(inside.trace()) == event_tuples(outside.trace())
        assert buffer_counts(inside.trace())["gradients"] == 2

    def test_a_size_that_depends_on_data_is_a_clear_error(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), AccessRecorder():
            x = torch.ones(3)
            with pytest.raises(TraceError, match="depends on data"):
                torch.nonzero(x)


class TestDistributed:
    @pytest.fixture
    def alone(self) -> Iterator[None]:
        """Make a process group of one."""
        from torch import distributed

        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        distributed.destroy_process_group()

    @pytest.mark.usefixtures("alone")
    def test_shape_queries_of_dtensor_are_no_memory(self) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        with AccessRecorder() as recorder:
            x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            (x @ x).sum()
        assert "aten::empty_strided" not in buffer_counts(recorder.trace(), "operation")
        assert [size for kind, name, size in accesses(recorder.trace()) if name == "aten::mm"] == [64, 64]

    @pytest.mark.usefixtures("alone")
    def test_gradients_that_are_views_of_buckets_are_gradients(self) -> None:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with AccessRecorder([model], [optimizer]) as recorder:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        trace = recorder.trace()
        bucket = (16 + 4) * 4
        assert (bucket, "gradients") in {(size, category) for _, _, size, _, category in event_tuples(trace)}
        assert "DistributedDataParallel.module" in buffer_counts(trace, "module")


class TestUse:
    def test_no_hook_remains_after_the_block(self) -> None:
        module = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        recorder = AccessRecorder([module], [optimizer])

        def fail() -> None:
            with recorder:
                module(torch.ones(1, 2)).sum().backward()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        length = len(recorder.trace())
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert len(recorder.trace()) == length
        assert not module._forward_pre_hooks
        assert not module.weight._post_accumulate_grad_hooks
        assert not nn.modules.module._global_forward_hooks

    def test_buffers_freed_after_the_block_are_alive_at_its_end(self) -> None:
        with AccessRecorder() as recorder:
            x = torch.ones(4)
        del x
        assert live(recorder.trace())[-1] == 16

    def test_garbage_is_collected_at_any_moment(self) -> None:
        class Node:
            pass

        before = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        try:
            with AccessRecorder() as recorder:
                for number in range(100):
                    node: Any = Node()
                    node.me, node.tensor = node, torch.ones(number + 1).view(-1) + 1
        finally:
            gc.set_threshold(*before)
        assert len(event_tuples(recorder.trace())) >= 500

    def test_frees_of_other_threads_come_between_rows(self) -> None:
        switch = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        kept: list[Any] = []
        stop = threading.Event()

        def drop() -> None:
            while not stop.is_set():
                kept.clear()

        thread = threading.Thread(target=drop)
        thread.start()
        try:
            with AccessRecorder() as recorder:
                for _ in range(500):
                    kept.append(torch.ones(8) + 1)  # noqa: PERF401 - one by one
        finally:
            stop.set()
            thread.join()
            sys.setswitchinterval(switch)
        assert buffer_counts(recorder.trace(), "operation")["aten::add.Tensor"] == 500

    def test_recording_ends_at_its_limit_with_a_warning(self) -> None:
        with (
            pytest.warns(RuntimeWarning, match="recording has ended after 50 events"),
            AccessRecorder(limit=50) as recorder,
        ):
            kept = [torch.ones(1) + 1 for _ in range(1000)]
        trace = recorder.trace()
        trace.validate()
        assert trace.metadata["truncated"] == "yes"
        assert 20 < len(trace) < 60 < len(kept)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes by fork")
    def test_a_forked_child_records_nothing(self) -> None:
        with AccessRecorder() as recorder:
            kept = torch.ones(2)
            child = os.fork()
            if child == 0:
                before = len(recorder.trace())
                kept += 1
                os._exit(len(recorder.trace()) - before)
            assert os.waitpid(child, 0)[1] == 0
