"""Shared libraries as files: their imports and exports are read, and libraries of small functions written."""

from __future__ import annotations

import _ctypes
import ctypes
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempool import UsageError
from mempool.rehearsal import elf
from mempool.rehearsal.standin import LIBRARY

HANDLER = "mempool_standin_missing"
#: Compiler symbols that libraries use if present.
WEAK = ("_ITM_", "__gmon_start__")

words = st.text("abcXYZ_019", min_size=1, max_size=40)
machines = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


# --- reading


@given(
    functions=st.lists(words.filter(lambda word: word != HANDLER), max_size=40, unique=True),
    silent=st.integers(0, 40),
    libraries=st.lists(words, max_size=4, unique=True),
)
@machines
def test_written_library_reads_back_its_functions_and_libraries(
    machine: str, functions: list[str], silent: int, libraries: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "machine", lambda: machine)
        path = Path(folder, "made.so")
        parts = {"silent": functions[:silent], "missing": functions[silent:], "needed": libraries}
        elf.write_library(path, "libmade.so", handler=HANDLER, **parts)
        assert elf.read_exports(path) == set(functions)
        assert elf.read_imports(path) == (libraries, {HANDLER})


def test_loader_finds_each_import_and_export_of_a_linked_library() -> None:
    path = Path(_ctypes.__file__)
    needed, imported = elf.read_imports(path)
    assert [name for name in needed if name.startswith("libc.so")]
    assert {"PyLong_FromLong", "PyErr_SetString"} <= imported
    exported = elf.read_exports(path)
    assert "PyInit__ctypes" in exported
    assert not exported & imported
    library, process = ctypes.CDLL(str(path)), ctypes.CDLL(None)
    assert [name for name in exported if not hasattr(library, name)] == []
    strong = [name for name in imported if not name.startswith(WEAK)]
    assert [name for name in strong if not hasattr(library, name) and not hasattr(process, name)] == []


def test_standin_exports_functions_of_cuda_and_imports_none() -> None:
    needed, imported = elf.read_imports(LIBRARY)
    assert {"cudaMalloc", "cuMemMap", "cublasCreate_v2", "ncclCommInitRank", HANDLER} <= elf.read_exports(
        LIBRARY
    )
    assert [name for name in (*needed, *imported) if name.startswith(("cu", "nccl", "libcu"))] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a library",
        b"\x7fELF\x01\x01\x01" + bytes(57),
        b"\x7fELF\x02\x01\x01" + bytes(57),
        LIBRARY.read_bytes()[:100],
        LIBRARY.read_bytes()[:5000],
    ],
    ids=["empty", "text", "32 bits", "no segments", "cut in its header", "cut in its tables"],
)
def test_files_that_are_no_libraries_are_refused_with_their_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(content)
    for read in (elf.read_imports, elf.read_exports):
        with pytest.raises(UsageError, match=r"other\.so is no"):
            read(path)
    with pytest.raises(FileNotFoundError):
        elf.read_exports(tmp_path / "absent.so")


def test_library_for_an_unknown_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UsageError, match="run on x86-64 and AArch64, not on riscv64"):
        elf.write_library(tmp_path / "made.so", "made.so", silent=[], missing=[], needed=[], handler=HANDLER)


# --- code


@given(at=st.integers(0, 1 << 15), text=st.integers(0, 1 << 20), pointer=st.integers(0, 1 << 16))
def test_code_for_aarch64_reaches_the_name_and_the_handler(at: int, text: int, pointer: int) -> None:
    """The instructions are adr x0, ldr x16 and br x16, decoded as the manual of the architecture has them."""
    at, pointer = 16 * at, 8 * pointer
    adr, load, branch = struct.unpack("<III", elf._MACHINES["aarch64"].call(at, text, pointer))
    assert (adr & 0x9F00001F, load & 0xFF00001F, branch) == (0x10000000, 0x58000010, 0xD61F0200)
    offset = (adr >> 5 & 0x7FFFF) << 2 | adr >> 29 & 3
    assert at + offset - (offset >> 20 << 21) == text
    words = load >> 5 & 0x7FFFF
    assert at + 4 + 4 * (words - (words >> 18 << 19)) == pointer


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no code for this machine")
def test_written_functions_return_0_or_the_status_of_their_family_and_are_named_once(tmp_path: Path) -> None:
    """The loader finds each of many functions, which share chains of the hash table."""
    statuses = {
        "cublasLtMatmulNew": 15,
        "cublasGetNew": 15,
        "cudnnGetNew": 3000,
        "cusolverGetNew": 9,
        "cusparseLtGetNew": 10,
        "cusparseGetNew": 10,
        "cufftGetNew": 16,
        "curandGetNew": 107,
        "ncclGetNew": 4,
        "nvrtcGetNew": 11,
        "nvmlGetNew": 3,
        "cuptiGetNew": 38,
        "cudaGetNew": 801,
        "cuGetNew": 801,
        "nvtxGetNew": 1,
    }
    silent = [f"cudaNew{i}" for i in range(3000)]
    path = tmp_path / "made.so"
    elf.write_library(
        path, "made.so", silent=silent, missing=list(statuses), needed=[LIBRARY.name], handler=HANDLER
    )
    program = f"""
import ctypes
ctypes.CDLL({str(LIBRARY)!r}, mode=ctypes.RTLD_GLOBAL)
made = ctypes.CDLL({str(path)!r})
assert not hasattr(made, "cudaNew3000")
assert [i for i in range(3000) if getattr(made, f"cudaNew{{i}}")(1, 2) != 0] == []
for _ in range(2):
    print({{name: getattr(made, name)() for name in {list(statuses)}}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{statuses}\n" * 2
    assert done.stderr.splitlines() == [
        f"mempool: the stand-in for CUDA lacks {name}; the call fails as unsupported"
        for name in statuses
        if not name.startswith("cupti")
    ]
