"""Checks that Python imports the installed packages, not others of the same names.

``traces`` and ``solvers`` are common words, and a folder with the sources hides the packages built from them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def check_built() -> None:
    """Check that this package has the native module, without importing the module.

    Raises:
        ImportError: this package is the source folder.
    """
    if importlib.util.find_spec("mempool._core") is None:
        here = Path(__file__).resolve().parent
        raise ImportError(
            f"{here} holds the sources of mempool, without its native module, and comes first on sys.path: "
            "run from another folder, or install the sources where they are (pip install -e .)"
        )


def check_siblings() -> None:
    """Check the origin of the sibling packages, without importing the packages.

    Raises:
        ImportError: a foreign package of that name comes first.
    """
    for name in ("traces", "solvers"):
        spec = importlib.util.find_spec(name)
        places = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or []]
        if spec is not None and not places:
            places = [Path(spec.origin or name)]
        if not any(
            (place / "py.typed").exists() and (place / "_mempool_sibling").exists() for place in places
        ):
            where = ", ".join(map(str, places)) or "nowhere"
            raise ImportError(
                f"the package {name!r} that Python finds ({where}) is not mempool's: something else "
                "of that name comes first on sys.path; rename it or run from another folder"
            )
