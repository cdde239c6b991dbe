"""What operations of NumPy and CuPy read and write.

    with ArrayRecorder() as recorder:
        x = recorder.watch(x)
        y = np.exp(x) + 1  # y is watched too
        recorder.step()
    trace = recorder.trace()

A watched array is an array of a subclass, which NumPy's protocols and its own methods tell of what is done
with it. What is made of watched arrays is watched. An access by someone who took a plain view of the memory
is not seen; `ArrayRecorder.escaped` counts the arrays of which that is known to have been possible, and
`ArrayRecorder.touch` and `ArrayRecorder.calls` declare what was done.
"""

from traces.recorders.arrays.recorder import ArrayRecorder

__all__ = ["ArrayRecorder"]
