"""Modules that `import mempool` imports, and memory that it takes."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mempool import _core

#: Packages imported only by the functions that need them.
HEAVY = ("ortools", "pyarrow", "pandas", "typer", "click", "rich", "torch", "cupy", "hypothesis")
#: Limit on the modules in addition to NumPy's, instead of a time (30 ms), which depends on the machine.
MOST_MODULES = 60


def fresh(code: str, cwd: object) -> str:
    """Return the output of code in a new Python process, with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=str(cwd),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["traces", "solvers", "mempool"])
def test_an_import_adds_few_modules_and_no_heavy_ones(package: str, tmp_path: object) -> None:
    code = (
        "import sys, numpy\n"
        "before = set(sys.modules)\n"
        f"import {package}\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    added = fresh(code, tmp_path).split()
    assert not [name for name in added if name.partition(".")[0] in HEAVY]
    assert len(added) <= MOST_MODULES, added


def test_an_import_prints_starts_and_installs_nothing(tmp_path: object) -> None:
    code = (
        "import threading, warnings, numpy as np\n"
        "from numpy._core.multiarray import get_handler_name\n"
        "import mempool\n"
        "assert threading.active_count() == 1\n"
        "assert get_handler_name() == 'default_allocator', get_handler_name()\n"
    )
    if not hasattr(__import__("numpy"), "_core"):
        code = code.replace("numpy._core", "numpy.core")
    assert fresh(code, tmp_path) == ""


def test_plans_are_made_without_or_tools(tmp_path: object) -> None:
    code = (
        "import sys\n"
        "sys.modules['ortools'] = None\n"
        "import mempool, numpy as np\n"
        "from solvers import Stop, check, solve\n"
        "from traces import Buffers\n"
        "for seed in range(20):\n"
        "    rng = np.random.default_rng(seed)\n"
        "    start = rng.integers(0, 20, 12)\n"
        "    buffers = Buffers.of(start, start + rng.integers(1, 9, 12), rng.integers(1, 99, 12))\n"
        "    check(solve(buffers, stop=Stop(nodes=10_000)), buffers)\n"
    )
    assert fresh(code, tmp_path) == ""


def test_the_pool_loads_no_large_modules_into_a_program(tmp_path: object) -> None:
    code = (
        "import sys, numpy as np\n"
        "before = set(sys.modules)\n"
        "import mempool, mempool.torch.introspection.diagnosis\n"
        "rng = np.random.default_rng(0)\n"
        "sizes = rng.integers(1, 100, 40) * 1024\n"
        "kept_for = rng.integers(1, 30, 40)\n"
        "pool = mempool.Pool(record='trace', background=False)\n"
        "alive = {}\n"
        "for k in range(200):\n"
        "    for address in alive.pop(k, []):\n"
        "        pool.free(address)\n"
        "    until = k + int(kept_for[k % 40])\n"
        "    alive.setdefault(until, []).append(pool.allocate(int(sizes[k % 40])))\n"
        "assert pool.plan_now()\n"
        "pool.save('plan')\n"
        "pool.close()\n"
        "mempool.Pool(plan='plan', background=False).close()\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    loaded = fresh(code, tmp_path).split()
    assert not {"pandas", "ortools", "numpy.ma", "html", "statistics"} & set(loaded)


def test_the_native_module_takes_little_of_the_room_for_thread_local_words() -> None:
    """Imports fail if libraries loaded late exceed the thread-local memory that glibc reserves for them."""
    elf = Path(_core.__file__).read_bytes()
    if elf[:5] != b"\x7fELF\x02":
        pytest.skip("no 64-bit ELF file")
    table, entry, count = struct.unpack_from("=Q14xHH", elf, 32)
    headers = [struct.unpack_from("=II5Q", elf, table + entry * at) for at in range(count)]
    thread_local = [header[6] for header in headers if header[0] == 7]
    assert 0 < sum(thread_local) <= 256
