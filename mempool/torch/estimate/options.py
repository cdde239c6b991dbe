"""Tunables of the estimate, all in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimateOptions:
    """Limits, shares and defaults of an estimate and of the search for remedies.

    Attributes:
        searched_objects: largest number of objects searched for tensors, in a functools cache or an output.
        batch_tries: most trials in the search for the largest batch.
        batch: largest batch that the search tries, in samples.
        report_modules: most modules in a text report.
        remedy_seconds: processor seconds after which no further fake run of a remedy starts.
        program_steps: optimizer steps of a program's run: the first makes the optimizer's state, and the
            third begins in steady state.
        program_seconds: seconds without an optimizer step after which a program is refused.
        dominant: share of the peak above which parameters, gradients and optimizer state dominate.
        message_lines: most source lines of a program in a message.
        tokens: tokens per sequence, if the configuration allows more and no length was requested.
    """

    searched_objects: int = 10_000
    batch_tries: int = 64
    batch: int = 1 << 24
    report_modules: int = 5
    remedy_seconds: float = 120.0
    dominant: float = 0.5
    program_steps: int = 3
    program_seconds: float = 60.0
    message_lines: int = 3
    tokens: int = 1024


#: Options in use.
OPTIONS = EstimateOptions()
