"""A lifetime-aware memory pool: record one iteration, plan every buffer's address, replay it.

import mempool.numpy

pool = mempool.numpy.install()
for batch in batches:
    train(batch)
    pool.step()
print(pool.report())
"""

from mempool._siblings import check_built, check_siblings

check_built()
check_siblings()

import mempool.cache_folder  # noqa: E402, F401 - notes the working folder
from mempool.errors import MempoolError, OutOfMemoryError, UsageError  # noqa: E402
from mempool.pool import Pool  # noqa: E402
from mempool.settings import Settings  # noqa: E402

__all__ = ["MempoolError", "OutOfMemoryError", "Pool", "Settings", "UsageError"]


def __dir__() -> list[str]:
    return __all__
