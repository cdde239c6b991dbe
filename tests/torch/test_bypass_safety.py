"""Safety of the open bypass: unwritten memory, threads, child processes and Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from adversary import resident_bytes
from bypassed import MIB, bypass_of, bypassed_count, mode_of, open_bypass, small_loop

import mempool.torch
from mempool.errors import UsageError
from mempool.torch.eager.mode import OffloadMode
from mempool.torch.offload.host_engine import HostEngine

pytestmark = pytest.mark.usefixtures("nothing_is_held")
CPU = torch.device("cpu")


def test_unwritten_storage_is_not_registered_even_with_a_view(open_pool: Any) -> None:
    """C++ functions write into such a storage next, without the dispatcher."""
    for _ in range(3):
        blank, viewed, written = torch.empty(2048), torch.empty(2048), torch.ones(2048)
        view = viewed.view(2, 1024)
    mode = mode_of(open_pool)
    mode.operations.close_bypass()
    found = [mode.storages.find(one.untyped_storage()) for one in (blank, viewed, written)]
    assert [one is not None for one in found] == [False, False, True]
    del view, found


def test_written_storage_is_evictable(open_pool: Any) -> None:
    mode = mode_of(open_pool)
    learned = torch.ones(4000)
    for _ in range(3):
        learned.add_(1)
    tensors = [torch.empty(2048 + i).fill_(4) for i in range(8)]  # distinct sizes: each is seen
    assert mode.operations.unwritten == {}
    seen = torch.empty(4000)
    assert len(mode.operations.unwritten) == 1
    before = bypass_of(open_pool).skipped_operations
    seen.add_(1)  # bypassed
    assert bypass_of(open_pool).skipped_operations == before + 1
    mode.operations.close_bypass()
    assert mode.operations.unwritten == {}
    mode.eviction.clear(set(), 0)
    assert [resident_bytes(mode, one) for one in (*tensors, seen)] == [0] * 9
    assert all(one.mean().item() == 4 for one in tensors)


def test_optimizer_steps_inside_the_backward_are_bypassed() -> None:
    """PyTorch's engine restores thread-local modes that the bypass has changed within the backward pass."""
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizers = {one: torch.optim.SGD([one], 0.01) for one in net.parameters()}

    def steps(one: Any) -> None:
        optimizers[one].step()
        optimizers[one].zero_grad()

    def train() -> None:
        net(torch.ones(8, 64)).square().mean().backward()

    hooks = [one.register_post_accumulate_grad_hook(steps) for one in optimizers]
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        for _ in range(40):
            train()
        assert bypass_of(pool).is_open
        assert bypassed_count(pool, train) > 20
    for hook in hooks:
        hook.remove()


def test_ctrl_c_while_opening_leaves_storages_in_place(
    open_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, bypass, x = mode_of(open_pool), bypass_of(open_pool), torch.ones(MIB)
    mode.operations.close_bypass()
    for _ in range(3):
        x + 1
    library = bypass._library
    monkeypatch.setattr(library, "mempool_bypass_open", broken_after(library.mempool_bypass_open))
    with pytest.raises(KeyboardInterrupt):
        bypass.open()
    mode.eviction.clear(set(), 0)
    assert resident_bytes(mode, x) == 4 * MIB
    assert (x + 1).mean().item() == 2


def broken_after(act: Any) -> Any:
    def broken(*args: Any) -> None:
        act(*args)
        raise KeyboardInterrupt

    return broken


def test_nothing_is_evicted_while_the_bypass_is_open(open_pool: Any) -> None:
    mode = mode_of(open_pool)
    x = torch.ones(MIB)
    mode.operations.record_of(x, x.untyped_storage())
    record = mode.storages.find(x.untyped_storage())
    assert record is not None
    mode.eviction.clear(set(), 0)
    assert resident_bytes(mode, x) == 4 * MIB
    mode.operations.close_bypass()
    mode.eviction.clear(set(), 0)
    assert resident_bytes(mode, x) == 0
    assert x.sum().item() == MIB
    del record


def test_unseen_writes_survive_an_eviction(open_pool: Any) -> None:
    mode, x = mode_of(open_pool), torch.ones(MIB)
    mode.operations.close_bypass()
    x.add_(1)
    mode.eviction.clear(set(), 0)  # there is a copy now
    x.sum()
    bypass_of(open_pool).open()
    for _ in range(3):
        x.add_(1)
    mode.operations.close_bypass()
    mode.eviction.clear(set(), 0)
    assert resident_bytes(mode, x) == 0
    assert x[0].item() == 5


def test_dead_bypassed_storages_hold_no_memory(open_pool: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    x = torch.ones(8)
    for _ in range(20_000):
        x = x + 1
    before = resident()
    for _ in range(200_000):
        x = x + 1
    assert resident() - before < 8 * MIB


def test_second_mode_for_a_device_is_refused(open_pool: Any) -> None:
    other = OffloadMode(HostEngine(1 << 20), CPU, 1 << 40)
    with pytest.raises(UsageError, match="a limit is set already"):
        other.__enter__()
    assert bypass_of(open_pool).is_open


def test_other_threads_are_not_bypassed(open_pool: Any) -> None:
    x, found = torch.ones(100), []
    assert bypassed_count(open_pool, lambda: x + 1) == 1
    before = bypass_of(open_pool).skipped_operations

    def work() -> None:
        found.append(x + 1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert bypass_of(open_pool).skipped_operations == before
    assert torch.equal(found.pop(), x + 1)


def test_forked_child_continues_without_bypass(open_pool: Any) -> None:
    x = torch.ones(1000)
    for _ in range(3):
        x = x + 1
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            for _ in range(3):
                x = x + 1
            good = bool(x.sum().item() == 7000) and not bypass_of(open_pool).is_open
        finally:
            os._exit(not good)
    assert os.waitpid(pid, 0)[1] == 0
    assert bypass_of(open_pool).is_open


def test_dispatch_keys_are_restored_at_the_end() -> None:
    before = str(torch._C._dispatch_tls_local_include_set())
    assert "DeferredInit" not in before
    with mempool.torch.install(device="cpu", limit="1GiB", background=False) as pool:
        open_bypass(pool, small_loop())
        assert "DeferredInit" in str(torch._C._dispatch_tls_local_include_set())
    assert str(torch._C._dispatch_tls_local_include_set()) == before


SCRIPT = """
    import torch, mempool.torch
    pool = mempool.torch.install(device="cpu", limit="1GiB")
    lin = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(lin.parameters(), 0.01)
    for _ in range(40):
        lin(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert pool.report().values["swapping"]["bypassed"] > 0
    print("well")
"""


def test_program_ends_cleanly_with_an_open_bypass() -> None:
    folder = str(Path(mempool.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={**os.environ, "PYTHONPATH": folder}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")
