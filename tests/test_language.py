"""Language of docstrings and test names: plain sentences with their nouns."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Packages in plain language.
PLAIN = ("traces", "solvers", "mempool")
#: Largest number of occurrences of a word in a thousand words of docstrings.
MOST_WHAT, MOST_IT = 3, 4
OPENINGS = re.compile(r"(What|Whether|Of|Those|Where)\b")
#: Words that are not allowed in names of tests; use nouns.
NO_NOUNS = {"what", "it", "one", "those"}


@functools.cache
def docstrings(package: str) -> list[tuple[str, str]]:
    """Return the docstrings of a package, each with its file and line."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text)
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


@pytest.mark.parametrize("package", PLAIN)
def test_docstrings_open_with_a_verb_or_a_noun(package: str) -> None:
    assert [place for place, text in docstrings(package) if OPENINGS.match(text)] == []


@pytest.mark.parametrize("package", PLAIN)
def test_docstrings_name_their_subjects(package: str) -> None:
    words = [word.lower() for _, text in docstrings(package) for word in re.findall(r"[A-Za-z']+", text)]
    assert 1000 * words.count("what") <= MOST_WHAT * len(words)
    assert 1000 * words.count("it") <= MOST_IT * len(words)


def test_names_of_tests_have_nouns() -> None:
    names = [
        f"{path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in re.findall(r"def (test_\w+)", path.read_text())
    ]
    assert [name for name in names if NO_NOUNS & set(name.partition("::")[2].split("_"))] == []
