"""Build the native test programs from the packages' sources; object files are cached by content."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / "mempool" / "native"
TRACES = HERE.parents[1] / "traces" / "native"
SOLVERS = HERE.parents[1] / "solvers" / "native"
DRIVER = HERE.parents[1] / "mempool" / "rehearsal" / "native" / "driver"
SANITIZERS = {
    "none": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}
os.environ.setdefault("ASAN_OPTIONS", "handle_sigill=1")  # see `flags`


def compiler() -> str:
    """Return the C++ compiler: $CXX, or c++."""
    return os.environ.get("CXX", "c++")


#: Prefixes of core sources outside the simulated world.
OUTSIDE_THE_WORLD = ("hook", "torch_", "checked", "c_api")


#: Quick builds of these omit pointer checks, a third of the compile time: the core of the world is
#: that of "stress", which has the checks.
TYPED = ("world",)


def flags(
    sanitizer: str, mutations: bool, *, world: bool = False, timed: bool = False, soon: bool = False
) -> list[str]:
    """Return the compiler flags of a kind of build; `soon`: a quick build, whose program is slow.

    Undefined behaviour is an illegal instruction in a quick build: a call that says which takes the compiler
    a quarter more time. The address sanitizer then names the line.
    """
    plain = ["-O3", "-DNDEBUG"] if timed else ["-O2"]
    watched = ["-O0" if soon else "-O1", "-g1", "-fno-omit-frame-pointer", "-fPIC"]  # for modules, too
    if soon and sanitizer == "address":
        watched.append("-fsanitize-undefined-trap-on-error")
    optimisation = plain if sanitizer == "none" else watched
    extra = ["-DMEMPOOL_MUTATIONS"] if mutations or world else []
    extra += ["-DMEMPOOL_WORLD", f"-I{HERE}"] if world else []
    common = ["-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror"]
    folders = [f"-I{folder}" for folder in (CORE, TRACES, SOLVERS)]
    return [*common, *folders, *optimisation, *SANITIZERS[sanitizer], *extra]


@functools.cache
def has_sanitizer(sanitizer: str) -> bool:
    """Return true if a program with the sanitizer can be linked and run."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "a.cpp"), Path(folder, "a")
        source.write_text("int main() { return 0; }\n")
        build = [compiler(), *SANITIZERS[sanitizer], str(source), "-o", str(program)]
        done = subprocess.run(build, capture_output=True, check=False)
        return (
            done.returncode == 0
            and subprocess.run([program], capture_output=True, check=False).returncode == 0
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build in a folder; later processes find its object files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(
    program: str, folder: Path, *, sanitizer: str = "none", mutations: bool = False, soon: bool = True
) -> Path:
    """Compile tests/native/PROGRAM.cpp with the core.

    "world" includes the threads of the simulated world; programs that end in "_bench" are compiled like the
    shipped modules. With `soon`, builds with a sanitizer are not optimised.

    Raises:
        RuntimeError: with the compiler's output.
    """
    world = program == "world"
    core = _core(*OUTSIDE_THE_WORLD if world else ())
    core += sorted((HERE / "world").glob("*.cpp")) if world else []
    folders = (CORE, TRACES, HERE, HERE / "world")
    options = flags(sanitizer, mutations, world=world, timed=program.endswith("_bench"), soon=soon)
    options += ["-fno-sanitize=null,alignment"] if soon and program in TYPED else []
    with _locked(folder):
        objects = _objects([HERE / f"{program}.cpp"], folder, folders, options)
        if sanitizer != "none":  # separate files show missing includes
            core = [_joined(core, folder)]
        objects += _objects(core, folder, folders, options)
        return _linked(folder / program, objects, options, "-ldl")


def _core(*left_out: str) -> list[Path]:
    """Return the sources of the core that do not need Python."""
    outside = ("bind_", "cupy_", "module", "numpy_", *left_out)
    return [p for p in sorted(CORE.rglob("*.cpp")) if not p.name.startswith(outside)]


def _joined(sources: list[Path], folder: Path) -> Path:
    """Return a file that includes the sources, so that the compiler reads their headers once."""
    folder.mkdir(parents=True, exist_ok=True)
    content = b"".join(bytes(source) + source.read_bytes() for source in sources)
    target = folder / f"joined-{hashlib.sha256(content).hexdigest()[:20]}.cpp"
    if not target.exists():
        Path(f"{target}.part").write_text("".join(f'#include "{source}"\n' for source in sources))
        Path(f"{target}.part").replace(target)
    return target


def _objects(sources: list[Path], folder: Path, folders: tuple[Path, ...], options: list[str]) -> list[Path]:
    """Compile sources with headers in the given folders; return the object files.

    Raises:
        RuntimeError: with the compiler's output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    headers = b"".join(p.read_bytes() for one in folders for p in sorted(one.rglob("*.h*")))

    def compiled(source: Path) -> Path:
        key = hashlib.sha256(
            repr((compiler(), options)).encode() + headers + source.read_bytes() + source.name.encode()
        ).hexdigest()[:20]
        target = folder / f"{source.stem[:20]}-{key}.o"
        if not target.exists():
            _run([compiler(), *options, "-c", str(source), "-o", f"{target}.part"])
            Path(f"{target}.part").replace(target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return list(workers.map(compiled, sources))


def _linked(program: Path, objects: list[Path], options: list[str], *link: str) -> Path:
    """Link object files; return the file, which is named after the program and its content.

    Raises:
        RuntimeError: with the linker's output.
    """
    key = hashlib.sha256("".join(map(str, objects)).encode()).hexdigest()[:20]
    target = program.parent / f"{program.stem}-{key}{program.suffix}"
    if not target.exists():
        _run([compiler(), *options, *map(str, objects), *link, "-o", f"{target}.part"])
        Path(f"{target}.part").replace(target)
    return target


def build_library(name: str, folder: Path) -> Path:
    """Compile tests/native/NAME/*.cpp, which do not use the core, to a shared library by a quick build.

    Raises:
        RuntimeError: with the compiler's output.
    """
    return _library(HERE / name, folder, "none", ())


def build_driver(folder: Path, *, sanitizer: str = "none", defines: tuple[str, ...] = ()) -> Path:
    """Compile the driver of the stand-in for CUDA, with late queues, to a separate shared library.

    Raises:
        RuntimeError: with the compiler's output.
    """
    return _library(DRIVER, folder, sanitizer, defines)


def _library(place: Path, folder: Path, sanitizer: str, defines: tuple[str, ...]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    options = [*flags(sanitizer, mutations=False, soon=True), "-shared", "-fPIC"]
    options += [f"-D{name}" for name in defines]
    if sanitizer != "none":  # sanitizers guess the size of a library's thread-local memory, sometimes wrongly
        options.append("-ftls-model=initial-exec")
    texts = b"".join(p.read_bytes() for p in sorted(place.iterdir()))
    key = hashlib.sha256(repr((compiler(), options)).encode() + texts).hexdigest()[:20]
    target = folder / f"lib{place.name}-{key}.so"
    with _locked(folder):
        if not target.exists():
            source = _joined(sorted(place.glob("*.cpp")), folder)
            _run([compiler(), *options, str(source), "-o", f"{target}.part"])
            Path(f"{target}.part").replace(target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    kind = sys.argv[2] if len(sys.argv) > 2 else "none"
    print(build(sys.argv[1], Path("build/native"), sanitizer=kind, mutations="mutations" in sys.argv))
