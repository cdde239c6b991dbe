"""The small library between PyTorch's allocator and the pool, compiled against the user's own torch.

PyTorch's classes have no stable binary interface, so the library belongs to one version of torch. It is built
when it is first needed and kept in a folder for caches: ``$MEMPOOL_CACHE``, else ``$XDG_CACHE_HOME/mempool``,
else ``~/.cache/mempool``.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from mempool import _core
from mempool.errors import UsageError
from mempool.logs import log

SOURCE = Path(__file__).with_name("companion.cpp")
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w")
COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300


def install() -> None:
    """Make ours PyTorch's CPU allocator.

    Raises:
        UsageError: it cannot be built, or PyTorch does not take it.
    """
    answer = _library().mempool_companion_install(*_core.torch_cpu_functions())
    if answer in (2, 3):
        raise UsageError("PyTorch's CPU allocator has been replaced by one that cannot be passed on to")
    if answer != 1:
        raise UsageError("PyTorch did not take the pool as its CPU allocator")


def uninstall() -> None:
    """Make the former allocator PyTorch's again, unless somebody has replaced ours."""
    _library().mempool_companion_uninstall()


def refusal() -> int:
    """Address of the C function that throws `torch.OutOfMemoryError` with the text it is given.

    Raises:
        UsageError: the library cannot be built.
    """
    return ctypes.cast(_library().mempool_companion_refuse, ctypes.c_void_p).value or 0


@functools.cache
def _library() -> ctypes.CDLL:
    built = build()
    try:
        library = ctypes.CDLL(str(built))  # never unloaded: tensors are freed through it until the very end
    except OSError:  # damaged, by a crash or a full disk
        built.unlink(missing_ok=True)
        try:
            library = ctypes.CDLL(str(build()))
        except OSError as error:
            raise UsageError(f"the companion for PyTorch cannot be loaded: {error}") from None
    library.mempool_companion_install.argtypes = [ctypes.c_void_p] * 4
    return library


def build() -> Path:
    """The library for the torch that is imported, built if need be.

    Raises:
        UsageError: there is no compiler, or it fails; says what to do.
    """
    import torch

    root = Path(torch.__file__).parent
    command = [
        *_compiler(),
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        str(SOURCE),
        f"-L{root / 'lib'}",
        "-lc10",
    ]
    told = repr(
        (SOURCE.read_bytes(), torch.__version__, torch.version.git_version, FLAGS, os.uname().machine)
    )
    name = f"torch-{torch.__version__}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    built = _folder(name) / name
    if not built.exists():
        log.info("building the companion for PyTorch %s", torch.__version__)
        _compile(command, built)
    return built


def _compile(command: list[str], built: Path) -> None:
    """Compile beside and rename: others may be about to load or to build it."""
    handle, beside = tempfile.mkstemp(suffix=".so", dir=built.parent)
    os.close(handle)
    try:
        done = subprocess.run(  # noqa: S603
            [*command, "-o", beside], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
            raise UsageError(f"the companion for PyTorch cannot be built: {first} ({shlex.join(command)})")
        with Path(beside).open("rb") as file:
            os.fsync(file)
        Path(beside).chmod(0o644)
        Path(beside).replace(built)
    except subprocess.TimeoutExpired:
        raise UsageError(f"the compiler took more than {_SECONDS} s: {shlex.join(command)}") from None
    except OSError as error:
        raise UsageError(f"the companion for PyTorch cannot be built: {error}") from None
    finally:
        Path(beside).unlink(missing_ok=True)


def _compiler() -> list[str]:
    """The C++ compiler's command, which is ``$CXX`` if that is set."""
    if chosen := os.environ.get("CXX", "").strip():
        try:
            return shlex.split(chosen)
        except ValueError as error:
            raise UsageError(f"$CXX is {chosen!r}: {error}") from None
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise UsageError(
        "a C++20 compiler is needed once, to build a small library against your PyTorch: "
        f"install one (Debian: apt install g++) or name it in $CXX; none of {', '.join(COMPILERS)} is there"
    )


def _folder(name: str) -> Path:
    """Where the library of this name is, or will be kept; where nothing can be, a folder of this process."""
    try:
        chosen, cache = os.environ.get("MEMPOOL_CACHE"), os.environ.get("XDG_CACHE_HOME")
        home = Path(cache) if cache else Path("~/.cache").expanduser()
        folder = (Path(chosen) if chosen else home / "mempool").absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / name).exists() or os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # nobody's home is nowhere
        pass
    temporary = Path(tempfile.mkdtemp(prefix="mempool-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary
