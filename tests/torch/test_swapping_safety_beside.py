"""What runs beside the program, or breaks it off: threads, children, Ctrl-C, ends, kernels in Python."""

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

from adversary import HERE_BYTES, Adversary, gone

from mempool.torch.eager import mode as swapping
from mempool.torch.eager import storages, transfers
from mempool.torch.eager.storages import AWAY
from mempool.torch.offload import host_engine

RETURNED = float(sum(range(1, 1001)))


def test_threads_have_what_they_touch_while_it_is_sent_away(swapper: Adversary) -> None:
    tensors = [gone(swapper) for _ in range(4)]
    work = threading.Event()

    def use(tensor: Any) -> list[float]:
        sums = [(tensor * 2).sum().item() / 2 for _ in range(40)]
        tensor.add_(1)
        work.set()
        return sums

    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(use, tensor) for tensor in tensors]
        while not all(f.done() for f in found):
            swapper.send_away()
    assert work.is_set()
    assert {s for f in found for s in f.result()} == {RETURNED}
    swapper.send_away()
    assert {tensor.sum().item() for tensor in tensors} == {RETURNED + 1000}


def test_a_backward_and_arrays_in_a_thread(swapper: Adversary) -> None:
    weight = gone(swapper).requires_grad_()
    found: list[Any] = []

    def work() -> None:
        (weight * weight).sum().backward()
        found.extend([weight.grad[4].item(), weight.detach().numpy()[5]])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [10.0, 6.0]


def test_a_thread_that_reads_takes_nothing_from_under_the_one_that_swaps() -> None:
    with Adversary(5, share=0.0) as swapper:
        weights = [gone(swapper) for _ in range(6)]
        swapper.share = 0.3
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


def test_work_for_an_older_executor_is_seen_and_older_threads_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = threading.Event()
    older = [threading.Thread(target=stop.wait, name=name) for name in ("older", "tqdm_monitor")]
    for thread in older:
        thread.start()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with Adversary(0, share=0.0) as swapper:
            tensor = gone(swapper)
            assert pool.submit(lambda: tensor.sum().item()).result() == RETURNED
    stop.set()
    for thread in older:
        thread.join()
    assert [r.message for r in caplog.records if "older;" in r.message]
    assert not [r.message for r in caplog.records if "Executor" in r.message]


def test_an_optimizer_that_steps_in_another_thread_is_told(
    swapper: Adversary, caplog: pytest.LogCaptureFixture
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
    assert swapper.counts.beside > 0
    assert swapper.counts.iterations == 0


def test_threads_go_on_when_swapping_ends() -> None:
    stop = threading.Event()
    found: list[float] = []
    with Adversary(0, share=0.0) as swapper:
        tensor = gone(swapper)

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
    assert threading.Thread.start.__module__ == "threading"


def test_a_forked_child_has_what_was_away_and_the_parent_keeps_its_own(swapper: Adversary) -> None:
    tensor = gone(swapper)
    child = os.fork()
    if child == 0:
        well = False
        try:
            tensor.add_(1)
            made = [tensor + i for i in range(20)]
            swapper.step()
            well = tensor.sum().item() == RETURNED + 1000 and made[3][0].item() == 5.0
        finally:
            os._exit(0 if well else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert HERE_BYTES(tensor.untyped_storage()) == 0
    assert tensor.sum().item() == RETURNED


def test_workers_of_a_loader_read_what_is_away(swapper: Adversary) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(gone(swapper).view(100, 10))
    swapper.send_away()
    rows = [batch.sum().item() for (batch,) in DataLoader(data, batch_size=10, num_workers=2)]
    assert sum(rows) == RETURNED


MOVING = frozenset((transfers.__file__, host_engine.__file__, str(Path(__file__).parent / "adversary.py")))


def broken_off(at: int, work: Any, files: frozenset[str] = MOVING) -> bool:
    """Do it, with Ctrl-C before the n-th line of what moves storages; whether there were so many."""
    lines = itertools.count()
    broken = False

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal broken
        if frame.f_code.co_filename not in files or frame.f_code.co_name in ("disturb", "send_away", "_make"):
            return trace if event == "call" else None
        if event == "line" and next(lines) == at:
            broken = True
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return broken


def test_nothing_of_python_runs_when_a_storage_ends(swapper: Adversary) -> None:
    """Ctrl-C that came there would be printed, and lost."""
    tensor = torch.ones(1000)
    held = swapper.storages.of(tensor)
    assert held is not None
    assert isinstance(held.__callback__, types.BuiltinMethodType)
    assert not broken_off(0, tensor.untyped_storage, frozenset((storages.__file__, swapping.__file__)))
    del tensor
    assert list(swapper.storages.dead) == [held]


def test_ctrl_c_while_what_has_ended_is_counted_out_counts_it_once() -> None:
    for at in itertools.count():
        with Adversary(at, share=0.0) as swapper:
            here = swapper.storages.here_bytes
            tensors = [torch.ones(1000) for _ in range(3)]
            swapper.mover.leave(swapper.storages.of(tensors[0]))
            swapper.mover.settle_all()
            swapper.mover.leave(swapper.storages.of(tensors[1]))
            swapper.mover.release(swapper.storages.of(tensors[1]))
            tensors.clear()
            files = frozenset((storages.__file__, swapping.__file__))
            broken = broken_off(at, swapper._bury, files)
            swapper._bury()
            assert swapper.storages.here_bytes == here
            assert not swapper.storages.known
        if not broken:
            break


def test_ctrl_c_on_any_line_of_a_move_loses_nothing() -> None:
    for at in itertools.count():
        with Adversary(at, share=0.0) as swapper:
            tensors = [torch.arange(1000.0).add_(1 + i) for i in range(2)]
            held = [swapper.storages.of(tensor) for tensor in tensors]

            def work(swapper: Any = swapper, held: Any = held) -> None:
                for one in held:
                    swapper.mover.leave(one)
                for one in held:
                    swapper.mover.release(one)
                swapper.mover.fetch(held[0])
                swapper.mover.bring(held[0])
                swapper.mover.returned(held[1], away=swapper.mover.lend(held[1]), wrote=False)

            broken = broken_off(at, work)
            for i, tensor in enumerate(tensors):
                assert tensor.sum().item() == RETURNED + 1000 * i
            swapper.send_away()
            tensors[0].add_(1)
            swapper.send_away()
            assert tensors[0].sum().item() == RETURNED + 1000
        if not broken:
            assert at > 20
            return


def test_what_is_lost_on_its_way_gives_everything_back(swapper: Adversary) -> None:
    leaving, coming, away = (torch.arange(1000.0).add_(1) for _ in range(3))
    transfers = swapper.mover
    transfers.leave(swapper.storages.of(leaving))
    for tensor in (coming, away):
        transfers.leave(swapper.storages.of(tensor))
        transfers.release(swapper.storages.of(tensor))
    transfers.fetch(swapper.storages.of(coming))
    del leaving, coming, away, tensor
    gc.collect()
    transfers.settle_all()
    swapper.step()
    assert not swapper.storages.known
    assert swapper.storages.here_bytes == 0


def test_what_a_failing_operation_wrote_is_not_undone(swapper: Adversary) -> None:
    first, short = gone(swapper), torch.zeros(3)
    swapper.send_away()
    before = first.clone()
    with pytest.raises(RuntimeError):
        torch._foreach_add_([first, short], [torch.ones(1000), torch.ones(4)])
    after = first.clone()
    swapper.send_away()
    assert torch.equal(first, after)
    assert before[0] == 1


def test_kernels_in_python_may_use_what_is_away(swapper: Adversary) -> None:
    hidden = gone(swapper)

    @torch.library.custom_op("mempool_tests::plus_hidden", mutates_args=())
    def plus_hidden(x: torch.Tensor) -> torch.Tensor:
        return x + hidden

    swapper.send_away()
    assert plus_hidden(torch.zeros(1000)).sum().item() == RETURNED


def test_an_operation_whose_schema_hides_that_it_writes(swapper: Adversary) -> None:
    library = torch.library.Library("mempool_hidden", "DEF")
    library.define("bump(Tensor x) -> ()")
    library.impl("bump", lambda x: (x.add_(1), None)[1], "CPU")
    tensor = gone(swapper)
    tensor.sum()  # it is here now, and its copy on the host is good
    torch.ops.mempool_hidden.bump(tensor.view(1000)[:1])
    torch.ops.mempool_hidden.bump(tensor)
    swapper.send_away()
    assert tensor[1].item() == 3


def test_functions_given_to_an_operation_may_use_what_is_away(swapper: Adversary) -> None:
    hidden = gone(swapper)
    chosen = torch.cond(torch.tensor(1) > 0, lambda x: x + hidden, lambda x: x - hidden, (torch.zeros(1000),))
    assert chosen.sum().item() == RETURNED


def test_what_was_never_written_stays_for_who_fills_it(swapper: Adversary) -> None:
    blank = torch.empty(1000)
    swapper.send_away()
    assert HERE_BYTES(blank.untyped_storage()) == 4000
    blank.zero_()
    swapper.send_away()
    assert HERE_BYTES(blank.untyped_storage()) == 0


def test_zeros_without_memory_stay_so(swapper: Adversary) -> None:
    zeros = torch._efficientzerotensor((1000,))
    made = zeros + torch.ones(1000)
    swapper.send_away()
    assert (zeros + made).sum().item() == 1000


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_scales_of_a_quantized_tensor_and_sizes_of_a_nested_one_stay(swapper: Adversary) -> None:
    scales, zeros = torch.full((400,), 0.5, dtype=torch.double), torch.zeros(400, dtype=torch.long)
    quantized = torch.quantize_per_channel(torch.ones(400, 4), scales, zeros, 0, torch.qint8)
    swapper.send_away()
    assert quantized.dequantize().sum().item() == 1600
    nested = torch.nested.nested_tensor([torch.ones(i, 3) for i in range(1, 400)])
    nested._nested_tensor_size().add(0)
    swapper.send_away()
    assert (nested * 2).to_padded_tensor(0.0).sum().item() == 6 * sum(range(1, 400))


def test_what_a_compiled_function_computes_is_right_and_it_is_told_that_it_is_not_compiled(
    swapper: Adversary, caplog: pytest.LogCaptureFixture
) -> None:
    hidden = gone(swapper)
    compiled = torch.compile(lambda x: (x + hidden).sum(), backend="eager")
    assert compiled(torch.zeros(1000)).item() == RETURNED
    assert len([r for r in caplog.records if "compiles nothing" in r.message]) == 1


SCRIPT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from mempool.torch.offload.host_engine import HostEngine
from mempool.torch.eager.mode import Swapper
swapper = Swapper(HostEngine(1 << 28), torch.device("cpu"), 1 << 20)
swapper.__enter__()
kept = [torch.full((1 << 18,), float(i)) for i in range(8)]
for held in list(swapper.storages.known.values()):
    swapper.mover.leave(held)
    swapper.mover.release(held)
swapper.mover.fetch(swapper.storages.of(kept[0]))
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
        pytest.param("del swapper", 0, marks=pytest.mark.full),
        ("1 / 0", 1),
    ],
)
def test_an_interpreter_ends_with_storages_away_and_on_their_way(end: str, code: int) -> None:
    command = [sys.executable, "-c", SCRIPT.format(end=end), str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == "2.0\n"
    assert "Exception ignored" not in ended.stderr


def test_nothing_is_away_that_the_program_asked_to_have_freed(swapper: Adversary) -> None:
    tensor = gone(swapper)
    tensor.untyped_storage().resize_(0)
    swapper.send_away()
    held = swapper.storages.of(tensor)
    assert held is not None
    assert held.state != AWAY
