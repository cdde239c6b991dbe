"""Which device of a trace a verb looks at: addresses of several are no one arena."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from traces import Trace

#: What to do with a trace of several devices where none is named: take all as one, the one with the largest
#: peak load, or refuse it.
Several = Literal["together", "largest", "refuse"]


def device_of(path: Path, trace: Trace, device: int | None, several: Several) -> int | None:
    """The device to look at; None for all events as they are.

    Args:
        path: the file, for messages.
        trace: its events.
        device: the one that was asked for, if any.
        several: what to do where none was.

    Raises:
        TraceError: the trace contradicts itself.
        typer.BadParameter: there is no such device, or one must be named.
    """
    devices = trace.devices
    named = ", ".join(map(str, devices)) or "none"
    if device is not None:
        if device not in devices:
            raise typer.BadParameter(f"{path} has no device {device}, but {named}", param_hint="--device")
        return device
    if len(devices) < 2 or several == "together":
        return devices[0] if len(devices) == 1 else None
    if several == "refuse":
        raise typer.BadParameter(f"{path} is of several devices: {named}; choose one with --device")
    trace.validate()  # as a whole, so that an error names its row
    return max(devices, key=lambda one: int(trace.on_device(one).load().max()))
