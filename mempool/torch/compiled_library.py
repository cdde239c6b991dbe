"""Small C++ libraries, compiled against the user's torch on first use, such as the allocator's.

PyTorch's classes have no stable binary interface, so each library is for one version of torch. Built
libraries are kept in the folder of `mempool.cache_folder`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from mempool import _core
from mempool.cache_folder import cache_folder
from mempool.errors import UsageError
from mempool.logs import log

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w")
COMPILERS = ("c++", "g++", "clang++")
#: CUDA headers that the guest includes; some packages lack a part of CUDA's headers.
CUDA_HEADERS = ("cuda_runtime.h", "crt/host_config.h")
#: Pattern of the folder with CUDA's headers, by package.
CUDA_PACKAGES = {"nvidia": "c*/include", "triton": "backends/nvidia/include"}
_SECONDS = 300
#: Header of a 64-bit ELF library. Three fields are read: the offset of the section table, which ends the
#: file, the size of an entry, and the number of entries.
_ELF = struct.Struct("<40xQ10xHH2x")


class Source(NamedTuple):
    """The source of a library that is compiled for the user's torch.

    Attributes:
        path: the C++ source file.
        libraries: torch's libraries to link with.
        symbol: a symbol that the built library contains.
        needs_cuda: whether the source includes headers of CUDA.
        headers: names of included headers in the folder of the source.
    """

    path: Path
    libraries: tuple[str, ...]
    symbol: str
    needs_cuda: bool = False
    headers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the library."""
        return self.path.stem

    def build(self) -> Path:
        """Return the library for the imported torch; build it if necessary.

        Raises:
            UsageError: the compiler is missing or fails; the message gives the remedy.
        """
        import torch

        version = torch.__version__, torch.version.git_version
        texts = [path.read_bytes() for path in (self.path, *map(self.path.with_name, self.headers))]
        told = repr((*texts, *version, FLAGS, self.libraries, os.uname().machine))
        mark = hashlib.sha256(told.encode()).hexdigest()[:16]
        name = f"{self.name}-torch-{torch.__version__}-{mark}.so"
        built = _folder(name) / name
        if not built.exists():
            command = self._command()
            log.info("building the %s for PyTorch %s", self.name, torch.__version__)
            self._compile(command, built)
        return built

    def _command(self) -> list[str]:
        """Return the compiler's command, without the output."""
        import torch

        root = Path(torch.__file__).parent
        return [
            *compiler(),
            *FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{root / 'include'}",
            *([f"-I{cuda_headers()}"] if self.needs_cuda else []),
            str(self.path),
            f"-L{root / 'lib'}",
            *(f"-l{name}" for name in self.libraries),
        ]

    def load(self) -> ctypes.CDLL:
        """Load the library; rebuild a damaged library, such as after a crash or on a full disk.

        Raises:
            UsageError: as for `build`, or the library cannot be loaded.
        """
        built = self.build()
        try:
            return self._loaded(built)
        except OSError:
            built.unlink(missing_ok=True)
            try:
                return self._loaded(self.build())
            except OSError as error:
                raise UsageError(f"the {self.name} for PyTorch cannot be loaded: {error}") from None

    def _loaded(self, built: Path) -> ctypes.CDLL:
        if not _is_whole(built.read_bytes(), self.symbol):
            raise OSError(f"{built} is damaged")
        return ctypes.CDLL(str(built))

    def _compile(self, command: list[str], built: Path) -> None:
        """Compile to a temporary file and rename it, since other processes may load or build the library."""
        handle, beside = tempfile.mkstemp(suffix=".so", dir=built.parent)
        os.close(handle)
        try:
            done = subprocess.run(  # noqa: S603
                [*command, "-o", beside], capture_output=True, text=True, timeout=_SECONDS, check=False
            )
            if done.returncode != 0:
                first = next(
                    (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()
                )
                raise UsageError(
                    f"the {self.name} for PyTorch cannot be built: {first} ({shlex.join(command)})"
                )
            with Path(beside).open("rb") as file:
                os.fsync(file)
            Path(beside).chmod(0o644)
            Path(beside).replace(built)
        except subprocess.TimeoutExpired:
            raise UsageError(f"the compiler took more than {_SECONDS} s: {shlex.join(command)}") from None
        except OSError as error:
            raise UsageError(f"the {self.name} for PyTorch cannot be built: {error}") from None
        finally:
            Path(beside).unlink(missing_ok=True)


def _is_whole(library: bytes, symbol: str) -> bool:
    """Return true if a library has its full length and a symbol; a load of a truncated file would crash."""
    if len(library) < _ELF.size or not library.startswith(b"\x7fELF\x02\x01"):
        return False
    sections, size, count = _ELF.unpack_from(library)
    return len(library) >= int(sections + size * count) and symbol.encode() in library


def compiler() -> list[str]:
    """Return the command of the C++ compiler; ``$CXX`` if set."""
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


def cuda_headers() -> Path:
    """Return the folder of CUDA's headers: of ``$CUDA_HOME``, an installed package, or the system.

    Raises:
        UsageError: the headers are in none of these places.
    """
    folders = [
        Path(os.environ[name], "include") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    for package, inside in CUDA_PACKAGES.items():
        found = importlib.util.find_spec(package)
        places = [] if found is None else list(found.submodule_search_locations or ())
        folders += [folder for place in places for folder in sorted(Path(place).glob(inside), reverse=True)]
    for folder in (*folders, Path("/usr/local/cuda/include")):
        if all((folder / name).is_file() for name in CUDA_HEADERS):
            return folder
    raise UsageError("CUDA's headers are needed once: install triton or CUDA's toolkit, or set $CUDA_HOME")


def _folder(name: str) -> Path:
    """Return the folder for this library; a temporary folder if the cache folder is not writable."""
    try:
        folder = cache_folder()
        if (folder / name).exists() or os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # the user has no home folder
        pass
    temporary = Path(tempfile.mkdtemp(prefix="mempool-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


#: Library between PyTorch's allocator and the pool.
COMPANION = Source(Path(__file__).with_name("companion.cpp"), ("c10",), "mempool_companion_install")
#: Allocator in front of PyTorch's own CUDA allocator.
GUEST = Source(
    Path(__file__).with_name("guest.cpp"),
    ("c10", "c10_cuda"),
    "mempool_guest_install",
    needs_cuda=True,
    headers=("guest_history.hpp",),
)


def install_cpu_allocator() -> None:
    """Replace PyTorch's CPU allocator by the pool.

    Raises:
        UsageError: the library cannot be built, or PyTorch refuses the allocator.
    """
    answer = _companion().mempool_companion_install(*_core.torch_cpu_functions())
    if answer in (2, 3):
        raise UsageError("PyTorch's CPU allocator has been replaced by one that cannot be passed on to")
    if answer != 1:
        raise UsageError("PyTorch did not take the pool as its CPU allocator")


def uninstall_cpu_allocator() -> None:
    """Restore PyTorch's former CPU allocator, unless another library replaced the pool's allocator."""
    _companion().mempool_companion_uninstall()


def out_of_memory_function() -> int:
    """Return the address of the C function that throws `torch.OutOfMemoryError` with a given text.

    Raises:
        UsageError: the library cannot be built.
    """
    return ctypes.cast(_companion().mempool_companion_refuse, ctypes.c_void_p).value or 0


def install_guest() -> None:
    """Install the guest in front of PyTorch's CUDA allocator, until the process ends.

    Raises:
        UsageError: the library cannot be built, or another allocator is in front of the guest.
    """
    if guest_library().mempool_guest_install(_core.torch_guest_functions()) != 1:
        raise UsageError("another library has replaced PyTorch's CUDA allocator since the guest came")


def allocator_settings() -> str:
    """Return the settings of PyTorch's allocator: those set last, else the environment's."""
    settings: bytes = guest_library().mempool_guest_settings()
    return settings.decode()


def share_by_files() -> None:
    """Make PyTorch's allocator share expandable segments with other processes by file handles."""
    guest_library().mempool_guest_share_by_files()


def hand_back_arena() -> None:
    """Hand an arena that the pool has released back to PyTorch's allocator."""
    guest_library().mempool_guest_hand_back()


@functools.cache
def guest_library() -> ctypes.CDLL:
    """Return the guest's library, built if necessary.

    Raises:
        UsageError: the library cannot be built.
    """
    library = GUEST.load()  # never unloaded: tensors are freed through it until the process ends
    library.mempool_guest_install.argtypes = [ctypes.c_void_p]
    library.mempool_guest_settings.restype = ctypes.c_char_p
    return library


@functools.cache
def _companion() -> ctypes.CDLL:
    library = COMPANION.load()  # never unloaded: tensors are freed through it until the process ends
    library.mempool_companion_install.argtypes = [ctypes.c_void_p] * 4
    return library
