"""Installation of a pool in PyTorch: served and unserved requests, and all ends of tensors."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import numpy as np
from around import OptimizerWrapper

import mempool.numpy
import mempool.torch
from mempool import UsageError, _core
from mempool.torch import compiled_library

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[mempool.torch.TensorPool]:
    with mempool.torch.install(device="cpu", background=False) as made:
        yield made


def owns(pool: mempool.Pool, tensor: Any) -> bool:
    return bool(pool.core.owns(tensor.untyped_storage().data_ptr()))


def run(script: str, *, chatty: bool = False, **environment: str) -> str:
    """Run a program; return its output. Assert success and, unless ``chatty``, an empty stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )
    assert (done.returncode, "" if chatty else done.stderr) == (0, ""), done.stderr
    return done.stdout


class TestInstall:
    def test_only_tensors_made_inside_are_served(self) -> None:
        before = torch.ones(1000)
        with mempool.torch.install(device="cpu") as pool:
            assert mempool.torch.is_installed()
            assert mempool.torch.installed() is pool
            inside = torch.ones(1000)
            assert owns(pool, inside)
            assert not owns(pool, before)
            del before
        assert not mempool.torch.is_installed()
        assert not owns(pool, torch.ones(1000))
        assert (inside == 1).all()

    def test_second_install_is_refused(self, pool: mempool.torch.TensorPool) -> None:
        with pytest.raises(UsageError, match="has a pool already"):
            mempool.torch.install(device="cpu")
        assert owns(pool, torch.ones(1000))

    def test_off_mode_leaves_pytorch_unchanged(self) -> None:
        with mempool.torch.install(device="cpu", mode="off") as pool:
            assert not owns(pool, torch.ones(1000))

    def test_numpy_and_pytorch_have_separate_pools(self, pool: mempool.torch.TensorPool) -> None:
        with mempool.numpy.install(background=False) as arrays:
            array, tensor = np.ones(1000), torch.ones(1000)
            shared = torch.from_numpy(array)
            assert arrays.core.owns(array.ctypes.data)
            assert not owns(pool, shared)
            assert owns(pool, tensor)
            assert pool.core.owns(tensor.numpy().ctypes.data)
            del array
            assert (shared == 1).all()
            del shared


class TestMemory:
    def test_empty_tensor_allocates_nothing(self, pool: mempool.torch.TensorPool) -> None:
        empty = torch.empty(0)
        assert empty.data_ptr() == 0
        assert pool.core.stats()["live_blocks"] == 0

    def test_storages_resize(self, pool: mempool.torch.TensorPool) -> None:
        tensor = torch.arange(1000)
        tensor.untyped_storage().resize_(80_000)
        tensor = tensor.new_empty(0).set_(tensor.untyped_storage(), 0, (10_000,))
        assert (tensor[:1000] == torch.arange(1000)).all()
        assert owns(pool, tensor)
        tensor.untyped_storage().resize_(0)
        assert pool.core.stats()["live_blocks"] == 0

    def test_foreign_storages_resize(self) -> None:
        """A storage keeps its allocator when resized."""
        old = torch.ones(1000)
        with mempool.torch.install(device="cpu") as pool:
            inside = torch.ones(1000)
            old.untyped_storage().resize_(8000)
        for tensor in (old, inside):
            tensor.untyped_storage().resize_(80_000)
            assert (tensor == 1).all()
            assert not owns(pool, tensor)
        with mempool.torch.install(device="cpu") as other:
            inside.untyped_storage().resize_(160_000)
            assert owns(other, inside)
            assert (inside == 1).all()

    def test_tensors_outlive_the_pool(self) -> None:
        gc.collect()
        before = _core.torch_cpu_hook().held()
        pool = mempool.torch.install(device="cpu")
        tensors = [torch.full((n,), n) for n in (3, 1000, 300_000)]
        pool.close()
        del pool
        gc.collect()
        assert _core.torch_cpu_hook().held() == before + 1
        assert all((tensor == len(tensor)).all() for tensor in tensors)
        tensors.clear()
        assert _core.torch_cpu_hook().held() == before

    def test_out_of_memory_is_pytorchs_own_error(self) -> None:
        with mempool.torch.install(device="cpu", max_reserved=64 * MIB) as pool:
            kept = torch.ones(MIB)
            with pytest.raises(torch.OutOfMemoryError, match=r"allocate 400000000 bytes.*limited to"):
                torch.ones(100_000_000)
            assert owns(pool, torch.ones(1000))
            assert (kept == 1).all()

    def test_copy_on_write_and_deep_copies(self, pool: mempool.torch.TensorPool) -> None:
        tensor = torch.arange(1000)
        lazy = torch._lazy_clone(tensor)
        lazy[0] = 7
        assert (tensor[0], lazy[0]) == (0, 7)
        assert owns(pool, lazy)
        del tensor, lazy
        assert pool.core.stats()["live_blocks"] == 0

    def test_shared_memory_is_unchanged(self, pool: mempool.torch.TensorPool) -> None:
        tensor = torch.arange(1000)
        tensor.share_memory_()
        assert not owns(pool, tensor)
        assert (tensor == torch.arange(1000)).all()

    @pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
    def test_pinning_loaders_are_unchanged(self, pool: mempool.torch.TensorPool) -> None:
        """Pinned memory is not from the CPU allocator; without an accelerator no memory is pinned."""
        data = [torch.full((1000,), number) for number in range(6)]
        loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True)
        for number, batch in enumerate(loader):
            assert owns(pool, batch) != batch.is_pinned()
            assert (batch == torch.tensor([[2 * number], [2 * number + 1]])).all()

    def test_redzones(self) -> None:
        with mempool.torch.install(device="cpu", check=True) as pool:
            tensor = torch.zeros(1000)
            behind = ctypes.c_float.from_address(tensor.data_ptr() + 4000)
            behind.value = 1
            assert any("past" in str(fault) for fault in pool.faults())


class TestIterations:
    @pytest.mark.parametrize("watched", [True, False])
    def test_repetitions_before_the_first_watched_step_get_no_plan(
        self, pool: mempool.torch.TensorPool, watched: bool
    ) -> None:
        """Repeated layers are an example: optimizer state would stay in their arena."""
        weight = torch.nn.Parameter(torch.ones(1000))
        if watched:
            pool.watch(torch.optim.SGD([weight], 0.1))
        for _ in range(20):
            weight.square().exp().sum()
            pool.plan_now()
        assert (pool.plans == 0) == watched

    def test_watched_step_inside_an_iteration_is_refused(self, pool: mempool.torch.TensorPool) -> None:
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([weight], 0.1)
        handle = pool.watch(optimizer)
        weight.sum().backward()
        with pool.iteration(), pytest.raises(UsageError, match="use one of them"):
            optimizer.step()
        assert (weight == 1).all()
        handle.remove()
        with pool.iteration():
            optimizer.step()
        assert (weight < 1).all()

    @pytest.mark.parametrize("deep", [0, 1, 2])
    def test_real_steps_of_a_plain_or_wrapped_optimizer_end_iterations(
        self, pool: mempool.torch.TensorPool, deep: int
    ) -> None:
        weight = torch.nn.Parameter(torch.ones(1000))
        optimizer: Any = torch.optim.SGD([weight], 0.1)
        for _ in range(deep):
            optimizer = OptimizerWrapper(optimizer)
        handle = pool.watch(optimizer)
        for _ in range(2**deep * 10):
            optimizer.zero_grad()
            (weight * 2).square().sum().backward()
            optimizer.step()
            pool.plan_now()
        report = pool.report().to_dict()
        assert report["iterations"] == 10
        assert deep or (report["state"], report["misses"]) == ("replaying", 0)
        handle.remove()
        for _ in range(2**deep):
            optimizer.step()
        assert pool.report().to_dict()["iterations"] == 10

    @pytest.mark.parametrize("what", ["text", "around nothing", "scheduler"])
    def test_refused_watch_keeps_detection(self, pool: mempool.torch.TensorPool, what: str) -> None:
        weight = torch.nn.Parameter(torch.ones(1000))
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([weight], 0.1), 1)
        refused = {"text": "adam", "around nothing": OptimizerWrapper(None), "scheduler": scheduler}[what]
        with pytest.raises(UsageError, match=rf"not {type(refused).__name__}"):
            pool.watch(refused)  # type: ignore[arg-type]
        for _ in range(20):
            weight.square().exp().sum()
            pool.plan_now()
        assert pool.plans > 0

    def test_saved_plans_of_all_lengths_replay_in_any_order(self, tmp_path: Path) -> None:
        """Allocations hit from the first step on if it is as recorded, else from the third at the latest."""

        def trained(seed: int, count: int, pool: mempool.torch.TensorPool | None = None) -> list[str]:
            torch.manual_seed(0)
            cell = torch.nn.GRU(32, 48, batch_first=True)
            optimizer = torch.optim.AdamW(cell.parameters())
            handle = None if pool is None else pool.watch(optimizer)
            chance, losses, output = random.Random(seed), [], None
            for _ in range(count):
                output, _ = cell(torch.ones(8, chance.choice([8, 12, 20]), 32))  # the last one is still alive
                optimizer.zero_grad()
                output.square().mean().backward()
                optimizer.step()
                losses.append(output.sum().item().hex())
                if pool is not None:
                    pool.plan_now()
                    after.append(pool.report().to_dict()["misses_total"])
            if handle is not None:
                handle.remove()
            return losses

        after: list[int] = []
        with mempool.torch.install(device="cpu", background=False) as first:
            trained(0, 120, first)
            assert after[-1] == after[-30]
            first.save(tmp_path / "plan")
        for seed in (0, 1, 2, 3):
            plain = trained(seed, 40)
            after.clear()
            with mempool.torch.install(device="cpu", background=False, plan=tmp_path / "plan") as second:
                assert trained(seed, 40, second) == plain
                assert second.plans == 0
            assert after[-1] == after[0 if seed == 0 else 1]
            assert after[0] == 0 or seed != 0


class TestProfiler:
    SCRIPT = """
        import json, sys, torch
        from torch.profiler import profile
        if {pool}:
            import mempool.torch
            mempool.torch.install(device="cpu")
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        def work():
            optimizer.zero_grad()
            loss = model(torch.ones(64, 300)).square().sum()
            loss.backward()
            optimizer.step()
            return [loss.item(), model(torch.ones(1, 300)).tolist()]
        work()
        with profile(profile_memory=True) as told: work()
        events = []
        def walk(event, depth):
            fields = event.extra_fields
            memory = [getattr(fields, name, None) for name in ("alloc_size", "total_allocated")]
            events.append([depth, event.name, *memory])
            for child in event.children: walk(child, depth + 1)
        for root in told.profiler.kineto_results.experimental_event_tree(): walk(root, 0)
        print(json.dumps(events))
    """

    def test_profiler_events_are_identical(self) -> None:
        """The profiler reports operations, allocations and frees in order, with the bytes in use."""
        plain, pooled = (
            json.loads(run(self.SCRIPT.format(pool=pool), chatty=True)) for pool in (False, True)
        )
        assert plain == pooled
        memory = [size for _, name, size, _ in plain if name == "[memory]"]
        assert {size > 0 for size in memory} == {True, False}
        assert len(memory) > 50


class TestEnds:
    def test_forked_child_and_loader_workers(self) -> None:
        out = run("""
            import os, warnings, torch, mempool.torch
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than processors
            torch.set_num_threads(1)  # threads of OpenMP do not survive a fork, with a pool or without
            pool = mempool.torch.install(device="cpu")
            kept = torch.arange(100_000)
            child = os.fork()
            if child == 0:
                assert (kept == torch.arange(100_000)).all()
                kept.untyped_storage().resize_(0)
                assert torch.ones(50_000).sum() == 50_000
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            class Data(torch.utils.data.Dataset):
                def __len__(self): return 20
                def __getitem__(self, i): return torch.full((1000,), i)
            loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)
            assert [int(b[-1, 0]) for b in loader] == [3, 7, 11, 15, 19]
            assert (kept == torch.arange(100_000)).all()
            print("well")
        """)
        assert out == "well\n"

    def test_interpreter_ends_with_living_tensors(self) -> None:
        out = run("""
            import sys, torch, mempool.torch
            mempool.torch.install(device="cpu")
            sys.kept = torch.ones(300_000)
            class Node: pass
            node = Node(); node.me = node; node.tensor = torch.ones(5000)
            leaked = torch.ones(5000); import ctypes; ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
            print("well")
        """)
        assert out == "well\n"


class TestCompiledLibrary:
    @pytest.mark.parametrize(
        ("compiler", "reason"),
        [
            (None, r"apt install g\+\+"),
            ("false", "cannot be built"),
            ("/nonexistent/c++", None),
            ('"g++', None),
        ],
    )
    def test_unusable_compiler_gives_a_line_and_leaves_no_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str | None, reason: str | None
    ) -> None:
        monkeypatch.setenv("MEMPOOL_CACHE", str(tmp_path))
        if compiler is None:
            monkeypatch.setenv("PATH", str(tmp_path))
            monkeypatch.delenv("CXX", raising=False)
        else:
            monkeypatch.setenv("CXX", compiler)
        with pytest.raises(UsageError, match=reason) as caught:
            compiled_library.COMPANION.build()
        assert compiler is None or "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_read_only_cache_falls_back_to_a_temporary_folder(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("MEMPOOL_CACHE", str(tmp_path / "file" / "folder"))
        built = compiled_library.COMPANION.build()
        with contextlib.suppress(OSError):
            assert built.exists()
            built.unlink()
            built.parent.rmdir()

    @pytest.mark.parametrize(
        "left", ["whole[:-100]", *(pytest.param(left, marks=pytest.mark.full) for left in ("b''", "other"))]
    )
    def test_damaged_library_is_rebuilt(self, tmp_path: Path, left: str) -> None:
        script = f"""
            import torch, mempool.torch
            from pathlib import Path
            from mempool.torch import compiled_library
            built = compiled_library.COMPANION.build()
            whole, libraries = built.read_bytes(), Path(torch.__file__).parent / "lib"
            other = (libraries / "libshm.so").read_bytes()
            built.write_bytes({left})
            mempool.torch.install(device="cpu")
            assert built.read_bytes() == whole or len(built.read_bytes()) == len(whole)
            print("well")
        """
        assert run(script, MEMPOOL_CACHE=str(tmp_path)) == "well\n"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch is a CUDA build")
@pytest.mark.parametrize("driver", ["libcuda.so.1", "libno-such.so"])
def test_install_on_cuda_refuses_a_cpu_build(driver: str) -> None:
    with pytest.raises(UsageError, match="built without CUDA"):
        mempool.torch.install(device="cuda", driver=driver)
    assert not mempool.torch.is_installed()
