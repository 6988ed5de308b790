"""Samples the GPUs and MIG instances of a node by NVML."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from srunddp.util.cuda_visible import VisibleDevice, visible
from srunddp.util.nvml import instances, unsupported_errors
from srunddp.util.sample_files import GPU_FIELDS

_AT = {field: number for number, field in enumerate(GPU_FIELDS)}
_REASONS = {  # the bits nvmlClocksEventReason...; bit 0x1 is left out, it only says "idle"
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x100: "display_clocks",
}
_KIB = 1 << 10
_MIB = 1 << 20
_ALL_LINKS = 0xFFFFFFFF  # NVML's scope id for the sum over all links
# With less than this many seconds between two readings, PCIe traffic is not measured: NVML needs
# 20 ms to measure each direction.
_NO_THROUGHPUT_BELOW = 1.0


class Gpu:
    """Samples one GPU or MIG instance.

    A value that the GPU does not support stays empty and is not asked for again. If the GPU fails,
    all values stay empty.

    Args:
        nvml: The module ``pynvml``.
        handle: NVML's handle of the GPU or MIG instance; None if the GPU had already failed.
        parent: For a MIG instance, the handle of its GPU; None for a GPU.
        label: The text of the columns that name the GPU in its rows.
        seconds: The interval between two readings, in seconds.
    """

    def __init__(self, nvml: Any, handle: Any, parent: Any, label: str, seconds: float) -> None:
        self.label = label
        self._nvml = nvml
        self._handle = handle
        self._unasked = unsupported_errors(nvml)
        gpm = Gpm.of(nvml, handle, parent) if handle is not None else None
        if handle is not None:
            self._questions = self._all(gpm, parent is not None, seconds)
        else:
            self._questions = []

    def _all(
        self, gpm: Gpm | None, is_instance: bool, seconds: float
    ) -> list[Callable[[], dict[str, str]]]:
        nvml = self._nvml
        handle = self._handle
        # NVML gives the power in milliwatts and the energy in millijoules.
        figures: dict[str, Callable[[], object]] = {
            "power_w": lambda: f"{nvml.nvmlDeviceGetPowerUsage(handle) / 1000:.3f}",
            "energy_j": lambda: f"{nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000:.3f}",
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        }
        own: list[Callable[[], dict[str, str]]] = [
            self._utilization,
            self._memory,
            self._throttled,
            self._nvlink,
        ]
        # The default arguments bind the present field and ask. Otherwise every lambda would use
        # their values after the loop.
        own += [lambda field=field, ask=ask: {field: str(ask())} for field, ask in figures.items()]  # type: ignore[misc]
        if gpm:
            return [*own, gpm.ask]
        # The PCIe counters are those of the whole GPU, so they say nothing about one MIG instance.
        if is_instance or seconds < _NO_THROUGHPUT_BELOW:
            return own
        return [*own, self._pcie]

    def sample(self) -> str:
        """Ask the GPU for the values of :data:`GPU_FIELDS`, and return them separated by commas;
        values that are not known are empty.
        """
        row = [""] * len(GPU_FIELDS)
        for ask in tuple(self._questions):
            try:
                for field, text in ask().items():
                    row[_AT[field]] = text
            except self._unasked:
                self._questions.remove(ask)
            except self._nvml.NVMLError as error:
                # Leave all values empty: a value read just before the GPU was lost would look like
                # a measurement after its loss.
                if isinstance(error, self._nvml.NVMLError_GpuIsLost):
                    return "," * (len(GPU_FIELDS) - 1)
        return ",".join(row)

    def _utilization(self) -> dict[str, str]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {
            "utilization_percent": str(rates.gpu),
            "memory_bandwidth_percent": str(rates.memory),
        }

    def _memory(self) -> dict[str, str]:
        memory = self._first_known(
            # Version 2 of the call excludes reserved memory, as nvidia-smi does.
            lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle, self._nvml.nvmlMemory_v2),
            lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle),
        )
        return {"memory_bytes": str(memory.used), "memory_limit_bytes": str(memory.total)}

    def _throttled(self) -> dict[str, str]:
        reasons = self._first_known(
            lambda: self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle),
            # Drivers before 535 have only this older function.
            lambda: self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle),
        )
        return {"throttled": "+".join(name for bit, name in _REASONS.items() if reasons & bit)}

    def _nvlink(self) -> dict[str, str]:
        nvml = self._nvml
        wanted = [
            nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
            nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        ]
        found = nvml.nvmlDeviceGetFieldValues(
            self._handle, [(field, _ALL_LINKS) for field in wanted]
        )
        # NVML sets a return code for each field. pynvml raises no exception for these.
        if any(each.nvmlReturn != nvml.NVML_SUCCESS for each in found):
            raise nvml.NVMLError_NotSupported
        received, sent = found
        return {
            "nvlink_received_bytes": str(received.value.ullVal * _KIB),
            "nvlink_sent_bytes": str(sent.value.ullVal * _KIB),
        }

    def _pcie(self) -> dict[str, str]:
        ways = {
            "received": self._nvml.NVML_PCIE_UTIL_RX_BYTES,
            "sent": self._nvml.NVML_PCIE_UTIL_TX_BYTES,
        }
        ask = self._nvml.nvmlDeviceGetPcieThroughput
        return {
            f"pcie_{name}_bytes_per_s": str(ask(self._handle, way) * _KIB)
            for name, way in ways.items()
        }

    def _first_known(self, newer: Callable[[], Any], older: Callable[[], Any]) -> Any:
        try:
            return newer()
        except (self._nvml.NVMLError_FunctionNotFound, AttributeError):
            # The driver or the pynvml package is too old for the newer call.
            return older()


class Gpm:
    """Measures the activity of one GPU or MIG instance between two calls of :meth:`ask`, by NVML's
    GPU performance monitoring (GPM).

    Args:
        nvml: The module ``pynvml``.
        gpu: NVML's handle of the GPU, or of the GPU that the MIG instance is part of.
        instance: The id of the MIG instance; None for a whole GPU.
    """

    def __init__(self, nvml: Any, gpu: Any, instance: int | None) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._instance = instance
        self._latest = nvml.nvmlGpmSampleAlloc()
        self._older = nvml.nvmlGpmSampleAlloc()
        self._has_before = False
        self._metrics = {
            "sm_percent": (nvml.NVML_GPM_METRIC_SM_UTIL, 0),
            "occupancy_percent": (nvml.NVML_GPM_METRIC_SM_OCCUPANCY, 0),
            "tensor_percent": (nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 0),
            "dram_percent": (nvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 0),
            "pcie_received_bytes_per_s": (nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
            "pcie_sent_bytes_per_s": (nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
        }
        self._question = nvml.c_nvmlGpmMetricsGet_t()
        self._question.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._question.numMetrics = len(self._metrics)
        for number, (metric, _) in enumerate(self._metrics.values()):
            self._question.metrics[number].metricId = metric

    @classmethod
    def of(cls, nvml: Any, handle: Any, parent: Any) -> Gpm | None:
        """Make a :class:`Gpm` for a GPU or a MIG instance.

        Args:
            nvml: The module ``pynvml``.
            handle: NVML's handle of the GPU or the instance.
            parent: For a MIG instance, the handle of its GPU; None for a GPU.

        Returns:
            The object; None if the GPU does not support GPM.
        """
        gpu = parent or handle
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
                return cls(nvml, gpu, nvml.nvmlDeviceGetGpuInstanceId(handle) if parent else None)
        return None

    def ask(self) -> dict[str, str]:
        """Return the activity since the last call, by column, in percent or bytes per second; empty
        at the first call.
        """
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._gpu, self._older)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._gpu, self._instance, self._older)
        # NVML compares two of its samples. This one is the latest now, and the next one will
        # overwrite the older one.
        self._latest, self._older = self._older, self._latest
        had_before = self._has_before
        self._has_before = True
        if had_before:
            return self._between()
        return {}

    def _between(self) -> dict[str, str]:
        self._question.sample1 = self._older
        self._question.sample2 = self._latest
        self._nvml.nvmlGpmMetricsGet(self._question)
        found = {}
        for number, (column, (_, unit)) in enumerate(self._metrics.items()):
            metric = self._question.metrics[number]
            if metric.nvmlReturn == self._nvml.NVML_SUCCESS:
                if unit:
                    found[column] = f"{metric.value * unit:.0f}"
                else:
                    found[column] = f"{metric.value:.2f}"
        return found


class _Known(VisibleDevice):
    index: int
    name: str
    handle: Any
    gpu: Any


class Gpus:
    """The GPUs that the tasks of this node use; none if NVML is missing.

    NVML shows only the GPUs that the device rules of this process's control group allow. If Slurm
    gives each task its own GPU, the GPUs of the other tasks are not visible.

    Args:
        seconds: The interval between two readings, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._nvml, self._known = _look()
        self._gpus: dict[str, Gpu] = {}

    def choose(self, wanted: Iterable[str | None]) -> bool:
        """Begin to sample the GPUs that CUDA shows for these values of ``CUDA_VISIBLE_DEVICES``.
        GPUs that were chosen before stay.

        Args:
            wanted: The values that the tasks have; None stands for an unset variable.

        Returns:
            Whether at least one GPU is sampled now.
        """
        for each in wanted:
            for device in visible(each, self._known)[0]:
                if device["uuid"] not in self._gpus:
                    parent = device["gpu"] if device["parent"] else None
                    # The CSV files have no quoting, so a name must not contain a comma.
                    name = device["name"].replace(",", " ")
                    label = f"{device['uuid']},{device['index']},{name}"
                    self._gpus[device["uuid"]] = Gpu(
                        self._nvml, device["handle"], parent, label, self._seconds
                    )
        return bool(self._gpus)

    def rows(self, time: str) -> str:
        """Sample every chosen GPU, and return one CSV line for each.

        Args:
            time: The first column of each line, in Unix time.
        """
        return "".join(f"{time},{gpu.label},{gpu.sample()}\n" for gpu in self._gpus.values())


def _look() -> tuple[Any, list[list[_Known]]]:
    """Load NVML. Return the module ``pynvml`` and the GPUs, None and no GPUs if NVML cannot be
    used. Each entry of the GPUs lists the MIG instances of one GPU, or the GPU itself.
    """
    try:
        import pynvml
    except ImportError:
        return None, []
    try:
        pynvml.nvmlInit()
        return pynvml, [_as_known(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None, []


def _as_known(nvml: Any, index: int) -> list[_Known]:
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        parent = nvml.nvmlDeviceGetUUID(gpu)
        name = nvml.nvmlDeviceGetName(gpu)
        found = [(nvml.nvmlDeviceGetUUID(each), each) for each in instances(nvml, gpu)]
    except nvml.NVMLError:
        # A GPU that is already lost keeps its place in the list, because CUDA_VISIBLE_DEVICES may
        # name the other GPUs by their index.
        parent = f"GPU-{index}-failed"
        name = ""
        gpu = None
        found = []
    if not found:
        return [_Known(uuid=parent, parent="", index=index, name=name, handle=gpu, gpu=gpu)]
    return [
        _Known(uuid=uuid, parent=parent, index=index, name=name, handle=handle, gpu=gpu)
        for uuid, handle in found
    ]
