"""Asks NVML about the health of this node's GPUs. Only a separate process may call these functions,
never a supervisor: after a fault the driver may not answer, and the caller would hang.

This module has been tested only with a fake NVML, and not on a real GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from srunddp.supervisor.failure import GpuFault, GpuFaultKind
from srunddp.supervisor.gpu_messages import GpuFigures
from srunddp.util.cuda_visible import VisibleDevice, visible
from srunddp.util.nvml import instances
from srunddp.util.quick_dataclass import dataclass
from srunddp.util.xid import XidKind, xid

Answer = TypeVar("Answer")

# What NVML gives as the id of the MIG instance if an event concerns the whole GPU.
_NO_INSTANCE = 0xFFFFFFFF
# NVML's bits (nvmlClocksEventReason...) for why a GPU is slowed. The bits for a power cap and for
# an idle GPU are left out, because these are not faults.
_SLOWDOWNS = {
    0x8: "slowed by its hardware",
    0x20: "slowed by heat",
    0x40: "slowed by heat, by its hardware",
    0x80: "slowed by the power brake",
}
_KINDS = {
    XidKind.PROGRAM: GpuFaultKind.PROGRAM,
    XidKind.HARDWARE: GpuFaultKind.HARDWARE,
    # The GPU at the other end of a link may be at fault, and it may be on another node.
    XidKind.LINK: GpuFaultKind.OTHER,
    XidKind.OTHER: GpuFaultKind.OTHER,
}


class _Known(VisibleDevice):
    """A GPU or a MIG instance.

    Attributes:
        instance: NVML's id of the MIG instance on its GPU; None for a GPU.
    """

    instance: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU that CUDA shows to this process, at least in part.

    Attributes:
        index: NVML's index.
        handle: NVML's handle; None if the GPU does not answer.
        uuid: The GPU's UUID, or that of the MIG instance that CUDA shows; empty if it is not known.
        instances: The UUIDs of the GPU's MIG instances, by NVML's id of each.
        own: The ids of those instances that CUDA shows; empty for a GPU without MIG.
    """

    index: int
    handle: Any
    uuid: str
    instances: Mapping[int, str]
    own: frozenset[int]

    def fault(self, what: str, kind: GpuFaultKind, number: int = 0, uuid: str = "") -> GpuFault:
        """Return a fault of this GPU.

        Args:
            what: The fault in a few words.
            kind: What the fault means for the node.
            number: The number of the Xid; 0 for none.
            uuid: The UUID of the MIG instance that has the fault; empty for that of this object.
        """
        return GpuFault(self.index, uuid or self.uuid, what, kind.value, number)


@dataclass(frozen=True)
class GpuState:
    """The state of one GPU: its lasting faults, and what slows it down now.

    Attributes:
        is_gone: Whether the GPU no longer answers.
        needs_reset: Whether the driver asks for a reset.
        errors: How many uncorrected memory errors there were since the driver was loaded; None if
            the GPU does not count them.
        is_remap_pending: Whether rows or pages of memory are retired at the next reset.
        has_remap_failed: Whether a row could not be retired.
        slowdowns: The reasons why its hardware, or heat, slows the GPU down now.
    """

    is_gone: bool = False
    needs_reset: bool = False
    errors: int | None = None
    is_remap_pending: bool = False
    has_remap_failed: bool = False
    slowdowns: tuple[str, ...] = ()


@dataclass(frozen=True)
class RemappedRows:
    """The row remapping of a GPU's memory, in which spare rows replace others.

    Attributes:
        is_pending: Whether a row is replaced at the next reset.
        has_failed: Whether a row could not be replaced.
    """

    is_pending: bool = False
    has_failed: bool = False


def load() -> Any:
    """Return the module ``pynvml``, with NVML initialised; None if there is no NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def find_gpus(nvml: Any, wanted: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA shows to a process.

    Args:
        nvml: The module that :func:`load` has returned.
        wanted: The value of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
    """
    handles = _handles(nvml)
    known = {index: _devices(nvml, index, handle) for index, handle in handles.items()}
    shown = {device["uuid"] for device in visible(wanted, list(known.values()))[0]}
    found = []
    for index, devices in known.items():
        own = [device for device in devices if device["uuid"] in shown]
        if not own:
            continue
        by_id = {
            device["instance"]: device["uuid"]
            # CUDA's instances may share one GPU instance, and then its id. The one that CUDA shows
            # is last here, so it stays.
            for device in (*devices, *own)
            if device["instance"] is not None
        }
        ids = {device["instance"] for device in own if device["instance"] is not None}
        uuid = "" if own[0]["uuid"] == _place_of(index) else own[0]["uuid"]
        found.append(Gpu(index, handles[index], uuid, by_id, frozenset(ids)))
    return found


def _handles(nvml: Any) -> dict[int, Any]:
    """Return the handles of the GPUs that this process may use, by NVML's index; None for a GPU
    that does not answer.
    """
    found = dict[int, Any]()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError_NoPermission:
            # Skip the GPUs of other jobs, with which nothing is wrong: unlike CUDA, NVML counts
            # them too.
            continue
        except nvml.NVMLError:
            found[index] = None
    return found


def _place_of(index: int) -> str:
    """Return the text that stands for the UUID of a GPU whose UUID is not known."""
    return f"GPU-{index}-failed"


def _devices(nvml: Any, index: int, handle: Any) -> list[_Known]:
    """Return a GPU's MIG instances, or the GPU itself if it has none. For a GPU that does not
    answer, return a placeholder, because ``CUDA_VISIBLE_DEVICES`` may name the other GPUs by index.
    """
    try:
        if handle is None:
            raise nvml.NVMLError_GpuIsLost
        parent = nvml.nvmlDeviceGetUUID(handle)
        found = [
            _Known(
                uuid=nvml.nvmlDeviceGetUUID(each),
                parent=parent,
                instance=nvml.nvmlDeviceGetGpuInstanceId(each),
            )
            for each in instances(nvml, handle)
        ]
    except nvml.NVMLError:
        return [_Known(uuid=_place_of(index), parent="", instance=None)]
    return found or [_Known(uuid=parent, parent="", instance=None)]


@dataclass
class _Inquiry:
    """Questions to NVML about one GPU.

    Attributes:
        nvml: The module that :func:`load` has returned.
        needs_reset: Whether the driver has answered a question by asking for a reset.
    """

    nvml: Any
    needs_reset: bool = False

    def ask(self, question: Callable[[], Answer]) -> Answer | None:
        """Call a function that asks NVML, and return its answer; None if the GPU, the driver or the
        package ``pynvml`` does not support the call.

        Raises:
            NVMLError_GpuIsLost: The GPU no longer answers.
        """
        try:
            return question()
        except self.nvml.NVMLError_GpuIsLost:
            raise
        except self.nvml.NVMLError_ResetRequired:
            self.needs_reset = True
        except (self.nvml.NVMLError, AttributeError):
            pass
        return None


def state_of(nvml: Any, gpu: Gpu) -> GpuState:
    """Ask NVML for the state of a GPU."""
    if gpu.handle is None:
        return GpuState(is_gone=True)
    try:
        return _state(nvml, gpu.handle)
    except nvml.NVMLError_GpuIsLost:
        return GpuState(is_gone=True)


def _state(nvml: Any, handle: Any) -> GpuState:
    inquiry = _Inquiry(nvml)
    # The answer is not needed, but a GPU that is lost or needs a reset reports that here.
    inquiry.ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    errors = inquiry.ask(lambda: _uncorrected_errors(nvml, handle))
    remapped = inquiry.ask(lambda: _remapped_rows(nvml, handle)) or RemappedRows()
    retired = inquiry.ask(lambda: bool(nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle)))
    reasons = inquiry.ask(lambda: _slowdown_bits(nvml, handle)) or 0
    return GpuState(
        needs_reset=inquiry.needs_reset,
        errors=errors,
        is_remap_pending=remapped.is_pending or bool(retired),
        has_remap_failed=remapped.has_failed,
        slowdowns=tuple(text for bit, text in _SLOWDOWNS.items() if reasons & bit),
    )


def _uncorrected_errors(nvml: Any, handle: Any) -> int:
    count: int = nvml.nvmlDeviceGetTotalEccErrors(
        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    return count


def _remapped_rows(nvml: Any, handle: Any) -> RemappedRows:
    # The tuple holds the numbers of rows with corrected and with uncorrected errors, whether a
    # remapping is pending, and whether one has failed.
    found = nvml.nvmlDeviceGetRemappedRows(handle)
    return RemappedRows(is_pending=bool(found[2]), has_failed=bool(found[3]))


def _slowdown_bits(nvml: Any, handle: Any) -> int:
    try:
        bits: int = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (nvml.NVMLError_FunctionNotFound, AttributeError):
        # Drivers before 535 know only this name.
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return bits


def faults_of(
    gpu: Gpu, now: GpuState, before: GpuState | None, *, with_old: bool = False
) -> list[GpuFault]:
    """Return the faults of a GPU.

    Args:
        gpu: The GPU.
        now: The GPU's state now.
        before: The GPU's state when the run began; None if it is not known. Without it, no memory
            error can be said to have happened in this run.
        with_old: Whether to include the memory errors since the driver was loaded, which may be
            months old.
    """
    hardware = GpuFaultKind.HARDWARE
    if now.is_gone:
        return [gpu.fault("it does not answer any more", hardware)]
    found = []
    if now.needs_reset:
        found.append(gpu.fault("the driver asks for a reset", hardware))
    if now.has_remap_failed:
        found.append(gpu.fault("a row of its memory could not be retired", hardware))
    if now.errors and with_old:
        what = f"{_errors(now.errors)} since the driver was loaded"
        found.append(gpu.fault(what, GpuFaultKind.OTHER))
    if before is not None and before.errors is not None:
        new_errors = (now.errors or 0) - before.errors
        if new_errors > 0:
            what = f"{_errors(new_errors)} since the start of the run"
            found.append(gpu.fault(what, hardware))
    if now.is_remap_pending:
        is_new = before is not None and not before.is_remap_pending
        what = "rows or pages of its memory are retired at the next reset"
        found.append(gpu.fault(what, hardware if is_new else GpuFaultKind.OTHER))
    found += [gpu.fault(f"{why} now", GpuFaultKind.OTHER) for why in now.slowdowns]
    return found


def _errors(count: int) -> str:
    return f"{count} uncorrected memory error{'' if count == 1 else 's'} (ECC)"


def fault_of_event(nvml: Any, gpus: Sequence[Gpu], event: Any) -> GpuFault | None:
    """Return the fault that an Xid event of NVML reports; None if the event concerns a GPU or a MIG
    instance that this process does not use.

    Args:
        nvml: The module that :func:`load` has returned.
        gpus: The GPUs of this process.
        event: The event that ``nvmlEventSetWait`` has returned.
    """
    gpu = next((each for each in gpus if _is_same(each.handle, event.device)), None)
    if gpu is None:
        return None
    number = int(event.eventData)
    known = xid(number)
    kind = _KINDS[known.kind]
    instance = int(event.gpuInstanceId)
    # A hardware fault of the GPU concerns all its MIG instances.
    is_other = gpu.own and instance != _NO_INSTANCE and instance not in gpu.own
    if is_other and kind is not GpuFaultKind.HARDWARE:
        return None
    return gpu.fault(str(known), kind, number, gpu.instances.get(instance, ""))


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two handles belong to the same GPU. NVML's handles are pointers, for which
    ctypes makes a new object each time.
    """
    try:
        return ctypes.addressof(one.contents) == ctypes.addressof(other.contents)
    except (AttributeError, ValueError):  # a null pointer, or a handle of a fake NVML
        return one is other


def figures(wanted: str | None) -> tuple[GpuFigures, ...]:
    """Return what the GPUs that CUDA shows to a process count now; empty without NVML.

    Args:
        wanted: The value of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
    """
    return tuple(
        GpuFigures(gpu.index, gpu.uuid, state.errors, state.is_remap_pending)
        for gpu, state in _states(wanted)
    )


def look(
    wanted: str | None, at_start: Iterable[GpuFigures] = (), *, with_old: bool = False
) -> list[GpuFault]:
    """Return the present faults of the GPUs that CUDA shows to a process; empty without NVML.

    Args:
        wanted: The value of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        at_start: The GPUs' figures when the run began, as far as they are known.
        with_old: Whether to include the memory errors since the driver was loaded, which may be
            months old.
    """
    # By UUID, because NVML numbers the other GPUs anew if one leaves its list.
    before = {
        each.uuid or each.index: GpuState(
            errors=each.errors, is_remap_pending=each.is_remap_pending
        )
        for each in at_start
    }
    return [
        fault
        for gpu, now in _states(wanted)
        for fault in faults_of(gpu, now, before.get(gpu.uuid or gpu.index), with_old=with_old)
    ]


def _states(wanted: str | None) -> list[tuple[Gpu, GpuState]]:
    nvml = load()
    if nvml is None:
        return []
    try:
        return [(gpu, state_of(nvml, gpu)) for gpu in find_gpus(nvml, wanted)]
    except nvml.NVMLError:
        return []
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
