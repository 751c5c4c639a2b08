"""The CUDA driver, asked directly: whether there is one, and what GPU it drives.

TensorRT ends the process when an engine is deserialized without a driver, so ask here first.
"""

from __future__ import annotations

import ctypes

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def present_gpu() -> str | None:
    """Return the compute capability of the first GPU, such as ``"sm90"``; None where there is no driver or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return None
    if cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    digits = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
        digits.append(value.value)
    return f"sm{digits[0]}{digits[1]}"
