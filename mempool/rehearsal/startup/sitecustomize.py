"""Startup hook of ``mempool rehearse``: Python imports this module before the program.

``mempool rehearse`` puts this folder on the path of the program and of its child processes.
"""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - what pathlib imports comes later
sys.path[:] = [entry for entry in sys.path if entry != _folder]

from mempool.rehearsal import child  # noqa: E402

child.begin()
# Import the sitecustomize module that Python would have found without this one; if none exists, the import
# error is the one that Python expects.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
