"""Recorder of the reads and writes of operations of NumPy and CuPy.

    with ArrayRecorder() as recorder:
        x = recorder.watch(x)
        y = np.exp(x) + 1  # y is watched too
        recorder.step()
    trace = recorder.trace()

A watched array is an array of a subclass, whose operations reach the recorder through NumPy's protocols and
the array's own methods. Results of operations on watched arrays are watched. Accesses through a plain view of
the memory are not recorded; `ArrayRecorder.escaped` counts the buffers for which a plain view is known to
have been taken, and `ArrayRecorder.touch` and `ArrayRecorder.calls` declare such accesses.
"""

from mempool.recording.arrays.recorder import ArrayRecorder

__all__ = ["ArrayRecorder"]
