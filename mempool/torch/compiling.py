"""Small libraries of ours, compiled against the user's own torch.

PyTorch's classes have no stable binary interface, so such a library belongs to one version of torch. It is
built when it is first needed and kept in a folder for caches: ``$MEMPOOL_CACHE``, else
``$XDG_CACHE_HOME/mempool``, else ``~/.cache/mempool``.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from mempool.errors import UsageError
from mempool.logs import log

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-w")
COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300
#: The head of a library of 64 bits, of which is read where its table of sections lies, which is its end, the
#: size of an entry, and their number.
_ELF = struct.Struct("<40xQ10xHH2x")


class Source(NamedTuple):
    """What one such library is made of.

    Attributes:
        path: of the source.
        libraries: of torch, that it is linked with.
        symbol: one that the library has.
    """

    path: Path
    libraries: tuple[str, ...]
    symbol: str

    @property
    def name(self) -> str:
        """Of the library."""
        return self.path.stem

    def build(self) -> Path:
        """The library for the torch that is imported, built if need be.

        Raises:
            UsageError: there is no compiler, or it fails; says what to do.
        """
        import torch

        root = Path(torch.__file__).parent
        command = [
            *compiler(),
            *FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-I{root / 'include'}",
            str(self.path),
            f"-L{root / 'lib'}",
            *(f"-l{name}" for name in self.libraries),
        ]
        version = torch.__version__, torch.version.git_version
        told = repr((self.path.read_bytes(), *version, FLAGS, self.libraries, os.uname().machine))
        mark = hashlib.sha256(told.encode()).hexdigest()[:16]
        name = f"{self.name}-torch-{torch.__version__}-{mark}.so"
        built = _folder(name) / name
        if not built.exists():
            log.info("building the %s for PyTorch %s", self.name, torch.__version__)
            self._compile(command, built)
        return built

    def load(self) -> ctypes.CDLL:
        """Load it, built anew if it is damaged, as by a crash or a full disk.

        Raises:
            UsageError: as `build`, or it cannot be loaded.
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
        """Compile beside and rename: others may be about to load or to build it."""
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
    """Whether it is as long as its head says, and has a symbol: to load what is cut ends the process."""
    if len(library) < _ELF.size or not library.startswith(b"\x7fELF\x02\x01"):
        return False
    sections, size, count = _ELF.unpack_from(library)
    return len(library) >= int(sections + size * count) and symbol.encode() in library


def compiler() -> list[str]:
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
