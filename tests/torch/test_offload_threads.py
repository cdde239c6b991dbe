"""Threads, child processes, Ctrl-C, the end of the interpreter, and kernels in Python."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from adversary import Adversary, offloaded_range, resident_bytes
from interrupts import interrupted_at

from mempool.torch.eager import interposer, storages, transfers
from mempool.torch.eager import mode as swapping
from mempool.torch.offload import host_engine

RETURNED = float(sum(range(1, 1001)))


def test_threads_get_their_arguments_during_evictions(mode: Adversary) -> None:
    tensors = [offloaded_range(mode) for _ in range(4)]
    work = threading.Event()

    def use(tensor: Any) -> list[float]:
        sums = [(tensor * 2).sum().item() / 2 for _ in range(40)]
        tensor.add_(1)
        work.set()
        return sums

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(use, tensor) for tensor in tensors]
        while not all(f.done() for f in found):
            mode.offload_all()
    assert work.is_set()
    assert {s for f in found for s in f.result()} == {RETURNED}
    mode.offload_all()
    assert {tensor.sum().item() for tensor in tensors} == {RETURNED + 1000}


def test_backward_and_arrays_in_a_thread_are_correct(mode: Adversary) -> None:
    weight = offloaded_range(mode).requires_grad_()
    found: list[Any] = []

    def work() -> None:
        (weight * weight).sum().backward()
        found.extend([weight.grad[4].item(), weight.detach().numpy()[5]])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [10.0, 6.0]


def test_reading_thread_does_not_evict_under_the_offloading_thread() -> None:
    with Adversary(5, share=0.0) as mode:
        weights = [offloaded_range(mode) for _ in range(6)]
        mode.share = 0.3
        done = threading.Event()
        sums: set[float] = set()

        def read() -> None:
            while not done.is_set():
                sums.update(w.sum().item() for w in weights)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(60):
            for one, other in itertools.pairwise(weights):
                assert (one + other).sum().item() == 2 * RETURNED
        done.set()
        thread.join()
    assert sums == {RETURNED}


def test_threads_older_than_the_limit_are_lent_their_arguments() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with Adversary(0, share=0.0) as mode:
            tensor = offloaded_range(mode)
            assert pool.submit(lambda: tensor.sum().item()).result() == RETURNED


def test_lend_ends_in_any_thread(mode: Adversary) -> None:
    """Kernels run operations in native threads, whose thread-local data Python drops after each call."""
    tensor = offloaded_range(mode)
    number = interposer.lend([tensor], "aten::add.Tensor", writes=False)
    thread = threading.Thread(target=interposer.give_back, args=(number,))
    thread.start()
    thread.join()
    record = mode.storages.of(tensor)
    assert record is not None
    assert record.pins == 0


def test_optimizer_step_in_another_thread_is_reported(
    mode: Adversary, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3)
        optimizer = torch.optim.SGD([parameter], 0.1)
        optimizer.step()
        optimizer.step()

    thread = threading.Thread(target=work, name="trainer")
    thread.start()
    thread.join()
    assert len([r for r in caplog.records if "steps in trainer" in r.message]) == 1
    assert mode.counts.other_threads > 0
    assert mode.counts.iterations == 0


def test_threads_continue_after_the_mode_ends() -> None:
    stop = threading.Event()
    found: list[float] = []
    with Adversary(0, share=0.0) as mode:
        tensor = offloaded_range(mode)

        def work() -> None:
            while not stop.is_set():
                found.append(tensor.sum().item())

        thread = threading.Thread(target=work)
        thread.start()
    while len(found) < 3:
        pass
    stop.set()
    thread.join()
    assert set(found) == {RETURNED}


def test_forked_child_and_parent_keep_offloaded_values(mode: Adversary) -> None:
    tensor = offloaded_range(mode)
    child = os.fork()
    if child == 0:
        well = False
        try:
            tensor.add_(1)
            made = [tensor + i for i in range(20)]
            mode.step()
            well = tensor.sum().item() == RETURNED + 1000 and made[3][0].item() == 5.0
        finally:
            os._exit(0 if well else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert resident_bytes(mode, tensor) == 0
    assert tensor.sum().item() == RETURNED


def test_loader_workers_read_offloaded_values(mode: Adversary) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(offloaded_range(mode).view(100, 10))
    mode.offload_all()
    rows = [batch.sum().item() for (batch,) in DataLoader(data, batch_size=10, num_workers=2)]
    assert sum(rows) == RETURNED


MOVING = frozenset((transfers.__file__, host_engine.__file__, str(Path(__file__).parent / "adversary.py")))


def test_no_python_runs_when_a_storage_dies(mode: Adversary) -> None:
    """Python would print and drop a Ctrl-C raised in a callback."""
    tensor = torch.ones(1000)
    record = mode.storages.of(tensor)
    assert record is not None
    assert isinstance(record.__callback__, types.BuiltinMethodType)
    assert not interrupted_at(0, tensor.untyped_storage, frozenset((storages.__file__, swapping.__file__)))
    del tensor
    assert list(mode.storages.dead) == [record]


def test_ctrl_c_while_removing_dead_storages_counts_each_once() -> None:
    for at in itertools.count():
        with Adversary(at, share=0.0) as mode:
            here = mode.storages.resident_bytes
            tensors = [torch.ones(1000) for _ in range(3)]
            mode.transfers.offload(mode.storages.of(tensors[0]))
            mode.transfers.wait_all()
            mode.transfers.offload(mode.storages.of(tensors[1]))
            mode.transfers.release(mode.storages.of(tensors[1]))
            tensors.clear()
            files = frozenset((storages.__file__, swapping.__file__))
            broken = interrupted_at(at, mode.operations.remove_dead, files)
            mode.operations.remove_dead()
            assert mode.storages.resident_bytes == here
            assert not mode.storages.records
        if not broken:
            break


def test_ctrl_c_on_any_line_of_a_move_loses_nothing() -> None:
    for at in itertools.count():
        with Adversary(at, share=0.0) as mode:
            tensors = [torch.arange(1000.0).add_(1 + i) for i in range(2)]
            record = [mode.storages.of(tensor) for tensor in tensors]

            def work(mode: Any = mode, record: Any = record) -> None:
                for one in record:
                    mode.transfers.offload(one)
                for one in record:
                    mode.transfers.release(one)
                mode.transfers.reload(record[0])
                mode.transfers.reload_now(record[0])
                mode.transfers.give_back(record[1], away=mode.transfers.lend(record[1]), wrote=False)

            broken = interrupted_at(at, work, MOVING)
            for i, tensor in enumerate(tensors):
                assert tensor.sum().item() == RETURNED + 1000 * i
            mode.offload_all()
            tensors[0].add_(1)
            mode.offload_all()
            assert tensors[0].sum().item() == RETURNED + 1000
        if not broken:
            assert at > 20
            return


def test_failed_transfers_free_their_memory(mode: Adversary) -> None:
    leaving, coming, away = (torch.arange(1000.0).add_(1) for _ in range(3))
    transfers = mode.transfers
    transfers.offload(mode.storages.of(leaving))
    for tensor in (coming, away):
        transfers.offload(mode.storages.of(tensor))
        transfers.release(mode.storages.of(tensor))
    transfers.reload(mode.storages.of(coming))
    del leaving, coming, away, tensor
    gc.collect()
    transfers.wait_all()
    mode.step()
    assert not mode.storages.records
    assert mode.storages.resident_bytes == 0


def test_writes_of_a_failing_operation_survive(mode: Adversary) -> None:
    first, short = offloaded_range(mode), torch.zeros(3)
    mode.offload_all()
    before = first.clone()
    with pytest.raises(RuntimeError):
        torch._foreach_add_([first, short], [torch.ones(1000), torch.ones(4)])
    after = first.clone()
    mode.offload_all()
    assert torch.equal(first, after)
    assert before[0] == 1


def test_python_kernels_use_offloaded_tensors(mode: Adversary) -> None:
    hidden = offloaded_range(mode)

    @torch.library.custom_op("mempool_tests::plus_hidden", mutates_args=())
    def plus_hidden(x: torch.Tensor) -> torch.Tensor:
        return x + hidden

    mode.offload_all()
    assert plus_hidden(torch.zeros(1000)).sum().item() == RETURNED


def test_undeclared_write_of_a_custom_operator_survives(mode: Adversary) -> None:
    library = torch.library.Library("mempool_hidden", "DEF")
    library.define("bump(Tensor x) -> ()")
    library.impl("bump", lambda x: (x.add_(1), None)[1], "CPU")
    tensor = offloaded_range(mode)
    tensor.sum()  # it is here now, and its copy on the host is good
    torch.ops.mempool_hidden.bump(tensor.view(1000)[:1])
    torch.ops.mempool_hidden.bump(tensor)
    mode.offload_all()
    assert tensor[1].item() == 3


def test_function_arguments_use_offloaded_tensors(mode: Adversary) -> None:
    hidden = offloaded_range(mode)
    chosen = torch.cond(torch.tensor(1) > 0, lambda x: x + hidden, lambda x: x - hidden, (torch.zeros(1000),))
    assert chosen.sum().item() == RETURNED


def test_unwritten_storage_stays_for_the_filling_code(mode: Adversary) -> None:
    blank = torch.empty(1000)
    mode.offload_all()
    assert resident_bytes(mode, blank) == 4000
    blank.zero_()
    mode.offload_all()
    assert resident_bytes(mode, blank) == 0


def test_zeros_without_memory_stay_unallocated(mode: Adversary) -> None:
    zeros = torch._efficientzerotensor((1000,))
    made = zeros + torch.ones(1000)
    mode.offload_all()
    assert (zeros + made).sum().item() == 1000


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantization_scales_and_nested_sizes_stay_resident(mode: Adversary) -> None:
    scales, zeros = torch.full((400,), 0.5, dtype=torch.double), torch.zeros(400, dtype=torch.long)
    quantized = torch.quantize_per_channel(torch.ones(400, 4), scales, zeros, 0, torch.qint8)
    mode.offload_all()
    assert quantized.dequantize().sum().item() == 1600
    nested = torch.nested.nested_tensor([torch.ones(i, 3) for i in range(1, 400)])
    nested._nested_tensor_size().add(0)
    mode.offload_all()
    assert (nested * 2).to_padded_tensor(0.0).sum().item() == 6 * sum(range(1, 400))


def test_compiled_function_is_correct_and_reported_as_not_compiled(
    mode: Adversary, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = offloaded_range(mode)
    compiled = torch.compile(lambda x: (x + hidden).sum(), backend="eager")
    assert compiled(torch.zeros(1000)).item() == RETURNED
    assert len([r for r in caplog.records if "compiles nothing" in r.message]) == 1


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from mempool.torch.offload.host_engine import HostEngine
from mempool.torch.eager.mode import OffloadMode
mode = OffloadMode(HostEngine(1 << 28), torch.device("cpu"), 1 << 20)
mode.__enter__()
kept = [torch.full((1 << 18,), float(i)) for i in range(8)]
for record in list(mode.storages.records.values()):
    mode.transfers.offload(record)
    mode.transfers.release(record)
mode.transfers.reload(mode.storages.of(kept[0]))
kept[1].untyped_storage().nbytes()
import atexit
atexit.register(lambda: print(kept[2][0].item()))
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("", 0, marks=pytest.mark.full),
        pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.full),
        pytest.param("del mode", 0, marks=pytest.mark.full),
        ("1 / 0", 1),
    ],
)
def test_interpreter_ends_with_transfers_under_way(end: str, code: int) -> None:
    command = [sys.executable, "-c", SCRIPT.format(end=end), str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "2.0\n"
    assert "Exception ignored" not in ended.stderr
