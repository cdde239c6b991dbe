"""Calls in a short-lived subprocess, whose libraries cost the program no memory: Arrow alone takes 50 MB."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
#: Program of the subprocess; stdout is redirected to stderr, so that prints do not mix with the answer.
_CODE = """
import os, pickle, sys
answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sys.path[:] = pickle.load(sys.stdin.buffer)
call, arguments, options = pickle.load(sys.stdin.buffer)
try:
    said = True, call(*arguments, **options)
except Exception as error:
    said = False, error
pickle.dump(said, answer)
"""


def apart(needs: str, call: Callable[..., T], *arguments: object, **options: object) -> T:
    """Call a function, in a subprocess if the function ``needs`` a module that is not loaded here.

    Function, arguments and result are pickled; no data from outside is unpickled. If no subprocess can be
    started, the call is made here.

    Raises:
        Exception: the error that the function raises.
    """
    said = None if needs in sys.modules or not sys.executable else _asked(call, arguments, options)
    if said is None:
        return call(*arguments, **options)
    good, result = said
    if not good:
        raise result
    value: T = result
    return value


def _asked(call: object, arguments: object, options: object) -> tuple[bool, Any] | None:
    """Return success of the call, and the result or error; None if the subprocess failed."""
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-I", "-c", _CODE],  # without PYTHONPATH, which `mempool run` may have changed
            input=pickle.dumps(sys.path) + pickle.dumps((call, arguments, options)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        said: tuple[bool, Any] = pickle.loads(done.stdout)  # noqa: S301 - of our own code
        return said
    except Exception:  # sandbox, embedded Python, no memory: in each case, the call can be made here
        return None
