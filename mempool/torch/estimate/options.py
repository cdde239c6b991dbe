"""Tunables of the estimate, all in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EstimateOptions:
    """Limits, shares and defaults of an estimate and of the search for remedies.

    Attributes:
        cache_objects: largest number of objects searched for fake tensors in one functools cache.
        mask_elements: elements of the largest real tensor that is read to know whether all values are one.
        output_objects: largest number of objects of an output that are searched for a key-value cache.
        output_share: smallest output that deserves a note, as a share of the parameters' bytes: a smaller
            output decides nothing.
        batch_tries: largest number of batches that the search for the largest batch tries.
        batch: largest batch that the search tries, in samples.
        report_modules: largest number of modules in a text report.
        remedy_runs: largest number of runs of changed jobs.
        remedy_seconds: processor seconds after which no further run of a changed job begins.
        program_steps: optimizer steps of a program that is run: the first makes the optimizer's state, and
            the third begins with all that outlives a step.
        program_seconds: seconds without an optimizer step after which a program is ended.
        no_saving: share of the peak below which a saving counts as none.
        dominant: share of the peak above which parameters and what belongs to them dominate.
        slowdown: share by which a step may take longer with offloading if no memory limit is given.
        offload_orders: orders that the offload planner tries for each limit; few, since the question is only
            whether offloading is worth trying. Likewise ``offload_halvings``, bisection steps for a slowdown.
        arena_nodes: node budget of an address plan of an offloaded step.
        arena_attempts: plans with lower limits until the arena of an offloaded step is small enough.
        offload_changes: largest number of single changes tried together with offloading, cheapest first, once
            all changes together suffice.
        loss_chunks: pieces into which the tokens are divided for a loss in pieces.
        known_elements: elements of the largest random order or list of indices that has values in a program.
        message_lines: largest number of lines of a program named in a message.
        tokens: tokens per sequence, if the configuration allows more and no length was requested.
        sound_samples: samples of sound if no length was requested: ten seconds at 16 kHz.
    """

    cache_objects: int = 10_000
    mask_elements: int = 1 << 24
    output_objects: int = 100_000
    output_share: float = 0.01
    batch_tries: int = 64
    batch: int = 1 << 24
    report_modules: int = 5
    remedy_runs: int = 60
    remedy_seconds: float = 120.0
    no_saving: float = 0.01
    dominant: float = 0.5
    slowdown: float = 0.1
    offload_orders: int = 2
    offload_halvings: int = 5
    arena_nodes: int = 10_000_000
    arena_attempts: int = 3
    offload_changes: int = 3
    loss_chunks: int = 8
    known_elements: int = 1 << 24
    program_steps: int = 3
    program_seconds: float = 60.0
    message_lines: int = 3
    tokens: int = 1024
    sound_samples: int = 160_000


#: Options in use.
OPTIONS = EstimateOptions()
