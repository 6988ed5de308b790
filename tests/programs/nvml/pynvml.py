# ruff: noqa: N801, N802, N803, N816 - the package's names
"""NVML without a GPU: what the JSON file named by ``FAKE_NVML`` says, with the names of the package
nvidia-ml-py.

    {"driver": "580.95.05", "cuda": 13000, "error": 18,
     "gpus": [{"uuid": "GPU-1", "name": "NVIDIA H100", "total": 85520809984, "free": 85000000000,
               "address": "00000000:17:00.0", "separate": [1], "failing": {"nvmlDeviceGetName": 15},
               "instances": [{"uuid": "MIG-1"}],
               "trace": [{"utilization": 97, "memory_utilization": 40, "used": 60000000000,
                          "power": 650000,
                          "energy": 1000000, "temperature": 61, "clocks": {"1": 1755, "2": 2619},
                          "reasons": 4,
                          "nvlink": [100, 200], "pcie": [1000, 2000],
                          "gpm": {"2": 80.5, "20": 12.5}}]}]}

``trace`` is what the GPU says sample by sample: a question for the utilization begins the next, and
the last one stays. Units are NVML's. What is not in it is not supported. ``nvlink`` and ``pcie``
are received and sent.

``errors`` (uncorrected), ``remapped`` and ``retired`` are what stays of a GPU. While it is used,
the file named by ``FAKE_NVML`` and ``.now`` may say something else of a GPU, by its index, and that
with ``.xids`` has an event in each line: ``{"gpu": 0, "xid": 79, "instance": 1}``.

With ``hangs`` the driver does not answer for this GPU. The file with ``.hangs`` is there once a
process waits for it, and that with ``.shut`` once one has called nvmlShutdown.

``error`` is what nvmlInit raises, ``failing`` what a function raises for this GPU, ``separate`` the
indices of GPUs without P2P to it. Without the variable there is no NVML here.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_DEVICE_MIG_DISABLE = 0
NVML_DEVICE_MIG_ENABLE = 1
NVML_SUCCESS = 0
NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_PCIE_UTIL_TX_BYTES = 0
NVML_PCIE_UTIL_RX_BYTES = 1
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
NVML_GPM_METRICS_GET_VERSION = 1
NVML_GPM_METRIC_SM_UTIL = 2
NVML_GPM_METRIC_SM_OCCUPANCY = 3
NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
NVML_GPM_METRIC_DRAM_BW_UTIL = 10
NVML_GPM_METRIC_PCIE_TX_PER_SEC = 20
NVML_GPM_METRIC_PCIE_RX_PER_SEC = 21
nvmlMemory_v2 = 0x02000028
nvmlEventTypeXidCriticalError = 8
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_P2P_STATUS_OK = 0
NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED = 1


class NVMLError(Exception):
    value = 999
    text = "Unknown Error"

    def __str__(self) -> str:
        return self.text


def _error(name: str, value: int, text: str) -> type[NVMLError]:
    return type(name, (NVMLError,), {"value": value, "text": text})


NVMLError_InvalidArgument = _error("NVMLError_InvalidArgument", 2, "Invalid Argument")
NVMLError_NotSupported = _error("NVMLError_NotSupported", 3, "Not Supported")
NVMLError_NoPermission = _error("NVMLError_NoPermission", 4, "Insufficient Permissions")
NVMLError_NotFound = _error("NVMLError_NotFound", 6, "Not Found")
NVMLError_DriverNotLoaded = _error("NVMLError_DriverNotLoaded", 9, "Driver Not Loaded")
NVMLError_LibraryNotFound = _error("NVMLError_LibraryNotFound", 12, "NVML Shared Library Not Found")
NVMLError_FunctionNotFound = _error("NVMLError_FunctionNotFound", 13, "Function Not Found")
NVMLError_GpuIsLost = _error("NVMLError_GpuIsLost", 15, "GPU is lost")
NVMLError_ResetRequired = _error("NVMLError_ResetRequired", 16, "GPU requires restart")
NVMLError_Timeout = _error("NVMLError_Timeout", 10, "Timeout")
NVMLError_LibRmVersionMismatch = _error(
    "NVMLError_LibRmVersionMismatch", 18, "RM has detected an NVML/RM version mismatch."
)


class c_nvmlMemory_t:
    def __init__(self, total: int, free: int) -> None:
        self.total = total
        self.free = free
        self.used = total - free


class c_nvmlUtilization_t:
    def __init__(self, gpu: int, memory: int) -> None:
        self.gpu = gpu
        self.memory = memory


class c_nvmlFieldValue_t:
    def __init__(self, value: int | None) -> None:
        self.nvmlReturn = NVML_SUCCESS if value is not None else NVMLError_NotSupported.value
        self.value = SimpleNamespace(ullVal=value or 0)


class c_nvmlGpmSupport_t:
    def __init__(self, supported: bool) -> None:
        self.isSupportedDevice = int(supported)


class c_nvmlGpmMetricsGet_t:
    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=999, value=0.0) for _ in range(8)]


class nvmlPciInfo_t:
    def __init__(self, address: str) -> None:
        self.busId = address


_machine: dict[str, Any] = {}


def _fail(code: int) -> None:
    raise next((known for known in NVMLError.__subclasses__() if known.value == code), NVMLError)(
        code
    )


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
    Path(os.environ["FAKE_NVML"] + ".shut").touch()


def nvmlSystemGetDriverVersion():
    return _machine["driver"]


def nvmlSystemGetCudaDriverVersion():
    return _machine["cuda"]


def nvmlDeviceGetCount():
    return len(_machine["gpus"])


def nvmlDeviceGetHandleByIndex(index):
    handle = _changed(_machine["gpus"][index])
    if handle.get("hangs"):
        Path(os.environ["FAKE_NVML"] + ".hangs").touch()
        time.sleep(600)
    _asked(handle, "nvmlDeviceGetHandleByIndex")
    return handle


def nvmlDeviceGetUUID(handle):
    _asked(handle, "nvmlDeviceGetUUID")
    return handle["uuid"]


def nvmlDeviceGetName(handle):
    _asked(handle, "nvmlDeviceGetName")
    return handle.get("name", "NVIDIA H100")


def nvmlDeviceGetMemoryInfo(handle, version=None):
    _changed(handle)
    _asked(handle, "nvmlDeviceGetMemoryInfo")
    total = handle.get("total", 80 << 30)
    used = _sample(handle).get("used")
    return c_nvmlMemory_t(total, handle.get("free", total) if used is None else total - used)


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


def nvmlDeviceGetP2PStatus(device1, device2, p2pIndex):
    if not isinstance(p2pIndex, int):
        raise ctypes.ArgumentError("Don't know how to convert parameter 3")
    apart = _machine["gpus"].index(device2) in device1.get("separate", ())
    return NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED if apart else NVML_P2P_STATUS_OK


def _sample(handle: dict[str, Any]) -> dict[str, Any]:
    trace = handle.get("trace") or [{}]
    sample: dict[str, Any] = trace[max(0, min(handle.get("at", 0), len(trace)) - 1)]
    return sample


def _said(handle: dict[str, Any], what: str) -> Any:
    if what not in _sample(handle):
        raise NVMLError_NotSupported(NVMLError_NotSupported.value)
    return _sample(handle)[what]


def nvmlDeviceGetUtilizationRates(handle):
    handle["at"] = handle.get("at", 0) + 1
    _asked(handle, "nvmlDeviceGetUtilizationRates")
    return c_nvmlUtilization_t(_said(handle, "utilization"), _said(handle, "memory_utilization"))


def nvmlDeviceGetPowerUsage(handle):
    _asked(handle, "nvmlDeviceGetPowerUsage")
    return _said(handle, "power")


def nvmlDeviceGetTotalEnergyConsumption(handle):
    _asked(handle, "nvmlDeviceGetTotalEnergyConsumption")
    return _said(handle, "energy")


def nvmlDeviceGetTemperature(handle, sensor):
    return _said(handle, "temperature")


def nvmlDeviceGetClockInfo(handle, type):
    return _said(handle, "clocks")[str(type)]


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    _asked(handle, "nvmlDeviceGetCurrentClocksEventReasons")
    return _said(handle, "reasons")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return _said(handle, "reasons")


def nvmlDeviceGetFieldValues(handle, fieldIds):
    received, sent = _sample(handle).get("nvlink", (None, None))
    known = {
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: received,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: sent,
    }
    # All links together; of one alone it would be less.
    return [
        c_nvmlFieldValue_t(known[field] if scope == 0xFFFFFFFF else 0) for field, scope in fieldIds
    ]


def nvmlDeviceGetPcieThroughput(device, counter):
    return _said(device, "pcie")[0 if counter == NVML_PCIE_UTIL_RX_BYTES else 1]


def nvmlDeviceGetGpuInstanceId(device):
    return device.get("instance", 1)


def nvmlGpmQueryDeviceSupport(device):
    traces = [each.get("trace", ()) for each in (device, *device.get("instances", ()))]
    return c_nvmlGpmSupport_t(any("gpm" in sample for trace in traces for sample in trace))


def nvmlGpmSampleAlloc():
    return {}


def nvmlGpmSampleGet(device, gpmSample):
    gpmSample.update(of=_sample(device).get("gpm", {}), at=device.get("at", 0))
    return gpmSample


def nvmlGpmMigSampleGet(device, gpuInstanceId, gpmSample):
    return nvmlGpmSampleGet(
        next(each for each in device["instances"] if each["instance"] == gpuInstanceId), gpmSample
    )


def nvmlGpmMetricsGet(metricsGet):
    if (
        metricsGet.version != NVML_GPM_METRICS_GET_VERSION
        or metricsGet.sample1["at"] >= metricsGet.sample2["at"]
    ):
        raise NVMLError_InvalidArgument(NVMLError_InvalidArgument.value)
    for metric in metricsGet.metrics[: metricsGet.numMetrics]:
        value = metricsGet.sample2["of"].get(str(metric.metricId))
        metric.nvmlReturn = NVML_SUCCESS if value is not None else NVMLError_NotSupported.value
        metric.value = value or 0.0
    return metricsGet


def _changed(handle: dict[str, Any]) -> dict[str, Any]:
    """What is said of a GPU by now."""
    index = _machine["gpus"].index(handle) if handle in _machine["gpus"] else -1
    try:
        now = json.loads(Path(os.environ["FAKE_NVML"] + ".now").read_text())
    except (OSError, ValueError):
        now = {}
    handle.update(now.get(str(index), {}))
    return handle


def _stays(handle: dict[str, Any], what: str, function: str) -> Any:
    _asked(_changed(handle), function)
    if what not in handle:
        raise NVMLError_NotSupported(NVMLError_NotSupported.value)
    return handle[what]


def nvmlDeviceGetTotalEccErrors(handle, errorType, counterType):
    return _stays(handle, "errors", "nvmlDeviceGetTotalEccErrors")


def nvmlDeviceGetRemappedRows(device):
    return tuple(_stays(device, "remapped", "nvmlDeviceGetRemappedRows"))


def nvmlDeviceGetRetiredPagesPendingStatus(device):
    return _stays(device, "retired", "nvmlDeviceGetRetiredPagesPendingStatus")


def nvmlEventSetCreate():
    # What was there before is not told to anybody.
    return {"gpus": [], "read": len(_events())}


def _events() -> list[dict[str, Any]]:
    try:
        lines = Path(os.environ["FAKE_NVML"] + ".xids").read_text().split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def nvmlDeviceRegisterEvents(handle, eventTypes, eventSet):
    _asked(handle, "nvmlDeviceRegisterEvents")
    eventSet["gpus"].append(handle)


def nvmlEventSetWait_v2(eventSet, timeoutms):
    end = time.monotonic() + timeoutms / 1000
    while time.monotonic() < end:
        for event in _events()[eventSet["read"] :]:
            eventSet["read"] += 1
            gpu = _machine["gpus"][event["gpu"]]
            if any(gpu is each for each in eventSet["gpus"]):
                return SimpleNamespace(
                    device=gpu,
                    eventType=nvmlEventTypeXidCriticalError,
                    eventData=event["xid"],
                    gpuInstanceId=event.get("instance", 0xFFFFFFFF),
                    computeInstanceId=0xFFFFFFFF,
                )
        time.sleep(0.01)
    raise NVMLError_Timeout(NVMLError_Timeout.value)
