"""Weighted sums of the published scores, with weights found by Bayesian optimisation.

Zhang et al. (arXiv 1903.06631) search the weights of a sum of their scores by the resulting duration of the
step. This module uses Optuna (Akiba et al., KDD 2019) with the TPE sampler, and sums ranks, since scores have
different units. Optuna is an optional dependency: ``pip install mempool[bayes]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


def search_weights(
    orders: dict[str, NDArray[np.int32]],
    stall_of: Callable[[NDArray[np.int32]], float],
    *,
    trials: int,
    seed: int = 0,
) -> None:
    """Call ``stall_of`` for ``trials`` combinations, each chosen by the sampler from the earlier results.

    Args:
        orders: by name of the score, the same rows, best first.
        stall_of: function that returns the stall in seconds with rows taken in this order; inf if the limit
            is not held.
        trials: number of combinations.
        seed: seed of the sampler; the same seed yields the same combinations.

    Raises:
        PlanError: Optuna is not installed.
    """
    if not trials or not orders or not len(next(iter(orders.values()))):
        return
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise PlanError(
            "combinations of scores are searched by Optuna: pip install 'mempool[bayes]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = np.sort(next(iter(orders.values())))
    ranks = {name: np.argsort(np.searchsorted(rows, order)) for name, order in orders.items()}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, multivariate=False))
    worst = 1.0
    for _ in range(trials):
        trial = study.ask()
        score = sum(trial.suggest_float(name, -1.0, 1.0) * rank for name, rank in ranks.items())
        stall = stall_of(rows[np.argsort(score, kind="stable")])
        if np.isfinite(stall):
            worst = max(worst, 2 * stall)
        study.tell(trial, stall if np.isfinite(stall) else worst)
