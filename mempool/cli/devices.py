"""Choice of the device of a trace that a verb works on: devices do not share an arena."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from traces import Trace

#: Treatment of a trace of several devices if none is named: take all devices as one, take the device with the
#: largest peak load, or refuse the trace.
Several = Literal["together", "largest", "refuse"]


def device_of(path: Path, trace: Trace, device: int | None, several: Several) -> int | None:
    """Return the device to work on; None for all events together.

    Args:
        path: the file, for messages.
        trace: events of the file.
        device: the requested device, if any.
        several: treatment of several devices if none was requested.

    Raises:
        TraceError: the trace contradicts itself.
        typer.BadParameter: the device does not exist, or a device must be named.
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
    trace.validate()  # the whole trace, so that an error names a row of the file
    return max(devices, key=lambda one: int(trace.on_device(one).load().max()))
