"""Python imports this before a program of ``mempool run``, whose environment puts this folder on the path."""

import importlib.util
import os
import sys

# By path: the package itself would import NumPy, which is for the program to do.
_path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "under.py")  # noqa: PTH100, PTH118, PTH120
_spec = importlib.util.spec_from_file_location("_mempool_under", _path)
assert _spec is not None
assert _spec.loader is not None
_under = importlib.util.module_from_spec(_spec)
sys.modules["_mempool_under"] = _under
_spec.loader.exec_module(_under)
_under.begin()
# Now the module of this name that Python would have found without us; if there is none, the error that says
# so is what Python expects.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
