"""``mempool rehearse`` before a program runs: its command line, and what has to be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from answers import Cli

from mempool.cli.rehearse.arguments import parse_variation, with_argument
from mempool.rehearsal.standin import find_installation

SCRIPT = "train.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program in the current folder, which nothing here runs."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / SCRIPT
    path.write_text("raise SystemExit('ran')")
    return path


def install_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None) -> Path:
    """Make Python find a PyTorch that consists of a version."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    kind = "Optional[str]"
    (package / "version.py").write_text(f"__version__ = {version!r}\ncuda: {kind} = {cuda!r}\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(folder)
    return package


# --- varied arguments


@pytest.mark.parametrize(
    ("arguments", "name", "expected"),
    [
        ("--batch_size=8 -v", "batch_size", "--batch_size=16 -v"),
        ("--batch-size=8", "batch_size", "--batch-size=16"),
        ("--batch_size 8 --x 8", "batch-size", "--batch_size 16 --x 8"),
        ("-b 8", "b", "-b 16"),
        ("-b=8", "b", "-b=16"),
        ("model=a batch_size=8", "batch_size", "model=a batch_size=16"),
        ("--size={n}x{n}", "n", "--size=16x16"),
        ("{n} n=8", "n", "16 n=8"),
        ("--batch_size=8 --batch_size=9", "batch_size", "--batch_size=16 --batch_size=9"),
        ("--my.lr=8 --myxlr=9", "my.lr", "--my.lr=16 --myxlr=9"),
        ("--batch_sizes=8", "batch_size", "--batch_sizes=8 --batch_size=16"),
        ("--epochs 3 --batch_size", "batch_size", "--epochs 3 --batch_size --batch_size=16"),
        ("", "batch_size", "--batch_size=16"),
    ],
)
def test_varied_argument_replaces_the_first_spelling_or_is_added(
    arguments: str, name: str, expected: str
) -> None:
    program = (SCRIPT, *arguments.split())
    assert with_argument(program, name, "16") == (SCRIPT, *expected.split())


def test_varied_argument_leaves_the_script_alone() -> None:
    assert with_argument(("n=8.py", "n=8"), "n", "9") == ("n=8.py", "n=9")


def test_added_argument_is_spelled_as_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('parser.add_argument("-b", "--batch-size")')
    for name in ("batch_size", "batch-size"):
        assert with_argument((str(script),), name, "8") == (str(script), "--batch-size=8")


def test_variation_is_a_name_with_values() -> None:
    assert parse_variation("batch_size=8,16") == ("batch_size", ("8", "16"))
    assert parse_variation("--lr=a=b") == ("lr", ("a=b",))
    for text in ("batch_size", "=8", "batch_size=", "batch_size=8,,16"):
        with pytest.raises(ValueError, match="not of the form NAME=VALUE,VALUE"):
            parse_variation(text)


# --- command lines that are refused before anything runs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("-a native,fast", "--allocator: no allocator 'fast'; there are native, expandable, async, mempool"),
        ("-a native,", "--allocator: no allocator ''"),
        ("--values ones", "--values: 'ones' is neither zero nor random"),
        ("--vary batch_size", "--vary: 'batch_size' is not of the form"),
        ("--card 'GPU 3000'", "--card: "),
        ("--limit much", "--limit: "),
        ("--limit 0%", "--limit: limit is '0%', not between 0% and 100%"),
        ("--limit 12 GB", "a size has no space here: say --limit 12GB"),
        ("--trace t.parquet -a native,async", "--trace is of one run"),
        ("--trace t.parquet --vary n=1", "--trace is of one run"),
        ("--trace t.parquet -a async", "--trace is of native or expandable"),
        ("--trace t.parquet -a mempool", "--trace is of PyTorch's own allocators"),
        ("--plan p.plan", "--plan is replayed by a pool: say -a mempool"),
        ("--steps 0", "'--steps'"),
        ("--ranks 0", "'--ranks'"),
        ("--devices 65", "'--devices'"),
        ("-c 'import torch'", "a rehearsal is of a script or of -m MODULE, not of -c"),
    ],
)
def test_senseless_option_is_refused_in_a_line_with_its_name(
    cli: Cli, script: Path, options: str, says: str
) -> None:
    assert says in cli.error(f"rehearse {options} {SCRIPT}", code=2)


def test_missing_files_are_named(cli: Cli, script: Path) -> None:
    assert "absent.py: No such file or directory" in cli.error("rehearse absent.py", code=3)
    says = cli.error(f"rehearse --trace absent/t.parquet {SCRIPT}", code=3)
    assert "absent/t.parquet: " in says
    script.with_name("traces.py").write_text("")
    assert "traces.py hides the package 'traces' of mempool; rename it" in cli.error(
        f"rehearse {SCRIPT}", code=2
    )


# --- what has to be installed


def test_missing_pytorch_is_named_in_a_line(cli: Cli, script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    says = cli.error(f"rehearse {SCRIPT}", code=4)
    assert says == "mempool: a rehearsal needs PyTorch: pip install 'mempool[torch]'\n"


def test_pytorch_without_cuda_is_named_with_version_and_place(
    cli: Cli, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install_fake(script.parent, monkeypatch, "2.11.0+cpu", None)
    says = cli.error(f"rehearse --json {SCRIPT}", code=4)
    assert says.startswith(f"mempool: PyTorch 2.11.0+cpu at {package} is a build without CUDA")


def test_installation_has_the_versions_of_pytorch_cuda_and_cudnn(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install_fake(script.parent, monkeypatch, "2.11.0+cu130", "13.0")
    (package / "lib").mkdir()
    (package / "lib" / "libtorch_cuda.so").write_text("no library")
    found = find_installation()
    assert (found.folder, found.version, found.cuda, found.cudnn) == (package, "2.11.0+cu130", "13.0", None)
    for name in ("nvidia_cudnn_cu12-9.1.0.70.dist-info", "nvidia_cudnn_cu13-9.19.0.56.dist-info"):
        (script.parent / name).mkdir()
    assert find_installation().cudnn == 91900


def test_damaged_library_of_pytorch_is_refused_with_its_name(
    cli: Cli, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install_fake(script.parent, monkeypatch, "2.11.0+cu130", "13.0")
    (package / "lib").mkdir()
    (package / "lib" / "libtorch_cuda.so").write_text("no library")
    assert "libtorch_cuda.so is no 64-bit shared library" in cli.error(f"rehearse {SCRIPT}", code=4)
