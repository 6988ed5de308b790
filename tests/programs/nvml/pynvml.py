# ruff: noqa: N801, N802, N803, N818 - the package's names
"""NVML without a GPU: what the JSON file named by ``FAKE_NVML`` says, with the names of the package nvidia-ml-py.

    {"driver": "580.95.05", "cuda": 13000, "error": 18,
     "gpus": [{"uuid": "GPU-1", "name": "NVIDIA H100", "total": 85520809984, "free": 85000000000,
               "address": "00000000:17:00.0", "links": 18, "separate": [1], "failing": {"nvmlDeviceGetName": 15},
               "instances": [{"uuid": "MIG-1"}]}]}

``error`` is what nvmlInit raises, ``failing`` what a function raises for this GPU, ``separate`` the indices of GPUs
without P2P to it. Without the variable there is no NVML here.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE = 0, 1
NVML_NVLINK_MAX_LINKS = 36
NVML_P2P_STATUS_OK, NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED = 0, 1


class NVMLError(Exception):
    value = 999
    text = "Unknown Error"

    def __str__(self) -> str:
        return self.text


class NVMLError_InvalidArgument(NVMLError):
    value, text = 2, "Invalid Argument"


class NVMLError_NotSupported(NVMLError):
    value, text = 3, "Not Supported"


class NVMLError_NoPermission(NVMLError):
    value, text = 4, "Insufficient Permissions"


class NVMLError_NotFound(NVMLError):
    value, text = 6, "Not Found"


class NVMLError_DriverNotLoaded(NVMLError):
    value, text = 9, "Driver Not Loaded"


class NVMLError_LibraryNotFound(NVMLError):
    value, text = 12, "NVML Shared Library Not Found"


class NVMLError_FunctionNotFound(NVMLError):
    value, text = 13, "Function Not Found"


class NVMLError_GpuIsLost(NVMLError):
    value, text = 15, "GPU is lost"


class NVMLError_LibRmVersionMismatch(NVMLError):
    value, text = 18, "RM has detected an NVML/RM version mismatch."


class c_nvmlMemory_t:
    def __init__(self, total: int, free: int) -> None:
        self.total, self.free, self.used = total, free, total - free


class nvmlPciInfo_t:
    def __init__(self, address: str) -> None:
        self.busId = address


_machine: dict[str, Any] = {}


def _fail(code: int) -> None:
    raise next((known for known in NVMLError.__subclasses__() if known.value == code), NVMLError)(code)


def _asked(handle: dict[str, Any], function: str) -> None:
    if code := handle.get("failing", {}).get(function):
        _fail(code)


def nvmlInit():
    if "FAKE_NVML" not in os.environ:
        raise NVMLError_LibraryNotFound(NVMLError_LibraryNotFound.value)
    _machine.clear()
    _machine.update(json.loads(Path(os.environ["FAKE_NVML"]).read_text()))
    if code := _machine.get("error"):
        _fail(code)


def nvmlShutdown():
    _machine.clear()


def nvmlSystemGetDriverVersion():
    return _machine["driver"]


def nvmlSystemGetCudaDriverVersion():
    return _machine["cuda"]


def nvmlDeviceGetCount():
    return len(_machine["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    handle = _machine["gpus"][index]
    _asked(handle, "nvmlDeviceGetHandleByIndex")
    return handle


def nvmlDeviceGetUUID(handle):
    _asked(handle, "nvmlDeviceGetUUID")
    return handle["uuid"]


def nvmlDeviceGetName(handle):
    _asked(handle, "nvmlDeviceGetName")
    return handle.get("name", "NVIDIA H100")


def nvmlDeviceGetMemoryInfo(handle, version=None):
    _asked(handle, "nvmlDeviceGetMemoryInfo")
    total = handle.get("total", 80 << 30)
    return c_nvmlMemory_t(total, handle.get("free", total))


def nvmlDeviceGetPciInfo(handle):
    _asked(handle, "nvmlDeviceGetPciInfo")
    return nvmlPciInfo_t(handle.get("address", "00000000:17:00.0"))


def nvmlDeviceGetMigMode(device):
    _asked(device, "nvmlDeviceGetMigMode")
    mode = NVML_DEVICE_MIG_ENABLE if "instances" in device else NVML_DEVICE_MIG_DISABLE
    return [mode, mode]


def nvmlDeviceGetMaxMigDeviceCount(device):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(device, index):
    if index >= len(device["instances"]):
        raise NVMLError_NotFound(NVMLError_NotFound.value)
    return device["instances"][index]


def nvmlDeviceGetNvLinkState(device, link):
    if not device.get("links"):
        raise NVMLError_NotSupported(NVMLError_NotSupported.value)
    return int(link < device["links"])


def nvmlDeviceGetP2PStatus(device1, device2, p2pIndex):
    if not isinstance(p2pIndex, int):
        raise ctypes.ArgumentError("Don't know how to convert parameter 3")
    apart = _machine["gpus"].index(device2) in device1.get("separate", ())
    return NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED if apart else NVML_P2P_STATUS_OK
