"""Startup hook of ``mempool run``: Python imports this module before the program.

The environment that ``mempool run`` sets puts this folder on the path.
"""

import importlib.util
import os
import sys

# Load by path: importing the package would import NumPy, which is left to the program.
_path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "child.py")  # noqa: PTH100, PTH118, PTH120
_spec = importlib.util.spec_from_file_location("_mempool_child", _path)
assert _spec is not None
assert _spec.loader is not None
_child = importlib.util.module_from_spec(_spec)
sys.modules["_mempool_child"] = _child
_spec.loader.exec_module(_child)
_child.begin()
# Import the sitecustomize module that Python would have found without this one; if none exists, the import
# error is the one that Python expects.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
