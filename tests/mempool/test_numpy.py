"""Installation of a pool in NumPy, and the end, forks and failures of programs with a pool."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mempool
import mempool.numpy
from mempool import _core

MIB = 1 << 20


def owns(pool: mempool.Pool, array: np.ndarray[Any, Any]) -> bool:
    return bool(pool.core.owns(array.ctypes.data))


def run(script: str, *flags: str, **environment: str) -> str:
    """Run a program; return its output after asserting success and an empty stderr."""
    done = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class TestInstall:
    def test_with_block_serves_its_own_arrays_only(self) -> None:
        with mempool.numpy.install() as pool:
            assert mempool.numpy.is_installed()
            assert mempool.numpy.installed() is pool
            assert owns(pool, np.ones(1000))
        assert not mempool.numpy.is_installed()
        assert not owns(pool, np.ones(1000))
        assert pool.report().to_dict()["allocations"] > 0

    @pytest.mark.parametrize("end", [lambda _: mempool.numpy.uninstall(), lambda pool: pool.close()])
    def test_uninstall_and_close_both_remove_the_pool(self, end: Callable[[mempool.Pool], None]) -> None:
        pool = mempool.numpy.install()
        end(pool)
        assert not mempool.numpy.is_installed()
        assert not owns(pool, np.ones(1000))

    def test_second_install_is_a_clear_error_and_changes_nothing(self) -> None:
        with mempool.numpy.install() as pool:
            with pytest.raises(mempool.UsageError, match="uninstall"):
                mempool.numpy.install()
            assert owns(pool, np.ones(1000))

    @pytest.mark.parametrize(
        "options", [{"device": "moon"}, {"device": _core.SimulatedDevice()}, {"sized": 1}]
    )
    def test_impossible_options_install_nothing(self, options: dict[str, Any]) -> None:
        with pytest.raises(mempool.UsageError):
            mempool.numpy.install(**options)
        assert not mempool.numpy.is_installed()

    def test_switched_off_pool_leaves_numpy_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MEMPOOL", "off")
        with mempool.numpy.install() as pool:
            assert not owns(pool, np.ones(1000))


class TestMemoryError:
    def test_numpys_own_error_carries_the_numbers(self) -> None:
        with mempool.numpy.install(max_reserved=64 * MIB):
            with pytest.raises(MemoryError) as raised:
                np.empty(100 * MIB)
            text = str(raised.value)
            assert "Unable to allocate 800. MiB for an array with shape" in text
            assert "reserved" in text
            assert "limited to 67,108,864" in text
            assert np.ones(1000).all()
        with pytest.raises(MemoryError) as raised:
            np.empty(1 << 60, np.uint8)
        assert str(raised.value).endswith("data type uint8")


class TestTheEnd:
    """The end of the interpreter with arrays alive; code that still runs must find the memory intact."""

    def test_interpreter_ends_with_arrays_in_modules_and_cycles(self) -> None:
        out = run("""
            import atexit, builtins, sys
            import numpy as np, mempool.numpy

            class Late:
                def __init__(self): self.me, self.array = self, np.full(5000, 3.0)
                def __del__(self): print(self.array.sum(), np.ones(100).sum())

            pool = mempool.numpy.install()
            builtins.kept = [np.ones(n) for n in (3, 1000, 300_000)]
            cycle = Late()
            atexit.register(lambda: print(np.arange(1000).sum()))
            np.mempool_test_array = np.ones(1000)
        """)
        assert out.split() == ["499500", "15000.0", "100.0"]

    def test_interpreter_ends_with_a_running_thread(self) -> None:
        run("""
            import threading, time
            import numpy as np, mempool.numpy

            def work():
                kept = []
                while True:
                    kept.append(np.ones(len(kept) % 5000))
                    del kept[:-50]

            mempool.numpy.install()
            for _ in range(3): threading.Thread(target=work, daemon=True).start()
            time.sleep(0.2)
        """)


class TestChildren:
    SCRIPT = """
        import os, sys, threading, warnings
        import numpy as np, mempool.numpy
        warnings.simplefilter("ignore", DeprecationWarning)

        pool = mempool.numpy.install()
        kept = [np.arange(n) for n in (3, 1000, 300_000)]
        def busy():
            while True: np.ones(3000).sum()
        for _ in range(2): threading.Thread(target=busy, daemon=True).start()
    """

    def test_forked_child_uses_frees_and_resizes_inherited_arrays(self) -> None:
        out = run(
            self.SCRIPT
            + """
        for turn in range(15):
            child = os.fork()
            if child == 0:
                for array in kept:
                    n = len(array)
                    array.resize(2 * n, refcheck=False)
                    assert (array[:n] == np.arange(n)).all() and not array[n:].any()
                kept.clear()
                assert np.zeros(100_000).sum() == 0
                mempool.numpy.uninstall()
                with mempool.numpy.install():
                    assert np.ones(1000).sum() == 1000
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all((array == np.arange(len(array))).all() for array in kept)
        print("well")
            """
        )
        assert out == "well\n"

    @pytest.mark.parametrize("background", [True, False])
    def test_trace_in_progress_belongs_to_the_parent_whatever_a_forked_child_does(
        self, tmp_path: Path, background: bool
    ) -> None:
        out = run(
            f"""
        import gc, os, sys, warnings
        import numpy as np, mempool.numpy
        from traces.formats.parquet import read_trace
        warnings.simplefilter("ignore", DeprecationWarning)

        path = {str(tmp_path / "t.trace")!r}
        pool = mempool.numpy.install(record=path, background={background})
        made = 0
        def work(count):
            global made
            made += count
            for _ in range(count): np.ones(5000)
        work(70_000)  # some of it is in the file, some in its buffer
        pool._trace_writer.drain()
        for way in ("exit", "close", "drop"):
            child = os.fork()
            if child == 0:
                work(3000)
                if way == "close": pool.close()
                if way == "drop":
                    mempool.numpy.uninstall()
                    pool._trace_writer = None
                    del pool
                    gc.collect()
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            work(1000)
        pool.close()
        trace = read_trace(path)
        trace.validate()
        print(int((trace.size == 40_000).sum()) == made, len(os.listdir({str(tmp_path)!r})))
            """
        )
        assert out == "True 1\n"

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_arrays_pass_through_multiprocessing(self, method: str, tmp_path: Any) -> None:
        script = tmp_path / "program.py"
        script.write_text(
            textwrap.dedent(f"""
            import multiprocessing, warnings
            import numpy as np, mempool.numpy

            def square(array): return array * array

            if __name__ == "__main__":
                warnings.simplefilter("ignore", DeprecationWarning)
                with mempool.numpy.install() as pool:
                    arrays = [np.arange(n) for n in range(0, 40_000, 4_000)]
                    with multiprocessing.get_context({method!r}).Pool(2) as workers:
                        for given, got in zip(arrays, workers.map(square, arrays)):
                            assert (got == given * given).all()
                    print("well")
            """)
        )
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")
