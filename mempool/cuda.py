"""CUDA devices for the adapters, with advice for missing drivers and devices."""

from __future__ import annotations

from mempool import _core
from mempool.errors import UsageError

DRIVER = "libcuda.so.1"

#: Advice for error texts of the driver or its library that contain the key.
_ADVICE = {
    "no CUDA driver": "install NVIDIA's driver; in a container, start that with the GPUs",
    ", which came with CUDA": "install a newer driver of NVIDIA's",
    "INSUFFICIENT_DRIVER": "install a newer driver of NVIDIA's; nvidia-smi shows which CUDA this one knows",
    "NO_DEVICE": "is there a GPU (nvidia-smi lists them), and does CUDA_VISIBLE_DEVICES hide it?",
    "NOT_PERMITTED": "may this user open /dev/nvidia*, and was the container started with the GPUs?",
    "OPERATING_SYSTEM": "may this user open /dev/nvidia*, and was the container started with the GPUs?",
    "NOT_INITIALIZED": "the driver serves no forked child: start processes by 'spawn'",
    "DEVICE_UNAVAILABLE": "another process has the GPU for itself: nvidia-smi shows its compute mode",
    "DRIVER_MISMATCH": "the kernel's part of the driver is of another version: restart the machine",
    "SYSTEM_NOT_READY": "a service of NVIDIA's does not run, such as the fabric manager: see nvidia-smi",
    "CUDA_ERROR_UNKNOWN": "the driver is in a bad state: see nvidia-smi, or restart the machine",
}


def device(index: int | None, driver: str = DRIVER, memory: str = "plain") -> _core.CudaDevice:
    """Return a device with memory of this kind, without starting the driver.

    Raises:
        UsageError: the driver is missing or too old; the message has the remedy.
    """
    try:
        return _core.CudaDevice(index, driver=driver, memory=memory)
    except (RuntimeError, ValueError) as error:
        raise UsageError(with_advice(error)) from None


def check(device: _core.CudaDevice) -> _core.CudaDevice:
    """Start the driver and return the device.

    Raises:
        UsageError: the driver does not start, or has no such device or memory; the message has the remedy.
    """
    try:
        device.check()
    except RuntimeError as error:
        raise UsageError(with_advice(error)) from None
    return device


def refusal_message(device: _core.CudaDevice, size: int) -> str:
    """Return the driver's error for this thread's request of ``size`` bytes, unless out of memory."""
    return f"CUDA error: {device.last_refusal}, while {size:,} bytes were asked for"


def with_advice(error: Exception) -> str:
    """Return the text of a driver's error, with advice if known."""
    text = str(error)
    for part, advice in _ADVICE.items():
        # CUDA's runtime writes the names without underscores
        if part.replace("_", "").lower() in text.replace("_", "").lower():
            return f"{text}; {advice}"
    return text
