"""What NVIDIA's GPU performance monitoring counts between two samples: Hopper and newer, without DCGM."""

from __future__ import annotations

from typing import Any

from srunddp.bootstrap.environment.cuda_visible_devices import answer

_MIB = 1 << 20


class Gpm:
    """The activity of one GPU or MIG instance since the last question.

    Args:
        nvml: the module; gpu: its handle, of an instance that of its GPU; instance: the number of the instance.
    """

    def __init__(self, nvml: Any, gpu: Any, instance: int | None) -> None:
        self._nvml, self._gpu, self._instance = nvml, gpu, instance
        self._latest, self._older = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
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
        """For a GPU, or where ``parent`` is its GPU for a MIG instance; None where that counts nothing."""

        def supported() -> Gpm | None:
            gpu = parent or handle
            if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
                return None
            return cls(nvml, gpu, nvml.nvmlDeviceGetGpuInstanceId(handle) if parent else None)

        try:
            return answer(nvml, supported, None)
        except nvml.NVMLError:
            return None

    def ask(self) -> dict[str, str]:
        """Percentages and bytes a second by column; none the first time.

        Raises:
            NVMLError: NVML's.
        """
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._gpu, self._older)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._gpu, self._instance, self._older)
        self._latest, self._older = self._older, self._latest
        if not self._has_before:
            self._has_before = True
            return {}
        return self._between()

    def _between(self) -> dict[str, str]:
        self._question.sample1, self._question.sample2 = self._older, self._latest
        self._nvml.nvmlGpmMetricsGet(self._question)
        found = {}
        for number, (column, (_, unit)) in enumerate(self._metrics.items()):
            metric = self._question.metrics[number]
            if metric.nvmlReturn == self._nvml.NVML_SUCCESS:
                found[column] = f"{metric.value * unit:.0f}" if unit else f"{metric.value:.2f}"
        return found
