"""The code of the process that asks NVML whether this node's GPUs are healthy. Only
``gpu_watch.py``, the supervisor's side, imports this module.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from srunddp.supervisor.failure import GpuFault, GpuFaultKind
from srunddp.supervisor.gpu_health import (
    Gpu,
    fault_of_event,
    faults_of,
    figures,
    find_gpus,
    load,
    look,
    state_of,
)
from srunddp.supervisor.gpu_messages import GpuFigures, GpusAtStart, GpusSay
from srunddp.util.sample_files import GPU_FAULTS

_LEAST = 19  # the lowest priority: the scripts import torch meanwhile
_MOST_FAULTS = 32  # in one message, which has to fit into one packet
_WAIT = 60_000  # milliseconds that NVML waits for an event; the process can be ended meanwhile
_PAUSE = 1.0  # seconds after an error of NVML, which may come again at once
# An answer includes an Xid that is not a hardware fault only for this number of seconds. The
# program may have handled an older one.
_RECENT = 60.0


def tell_figures(end: socket.socket) -> None:
    """Tell the supervisor what the GPUs count now, at the start of the run.

    Args:
        end: The socket to the supervisor.
    """
    os.nice(_LEAST)
    message = GpusAtStart(figures(os.environ.get("CUDA_VISIBLE_DEVICES")))
    with contextlib.suppress(OSError):
        end.send(message.encode())


def answer_once(end: socket.socket, at_start: Sequence[GpuFigures]) -> None:
    """Answer one question with the faults that NVML shows now.

    Args:
        end: The socket to the supervisor.
        at_start: What :func:`tell_figures` has told; empty if it has told nothing.
    """
    if end.recv(1):
        _send(end, look(os.environ.get("CUDA_VISIBLE_DEVICES"), at_start), is_answer=True)


def watch(end: socket.socket, record: Path | None) -> None:
    """Register for Xids, and answer until the supervisor closes its end or ends.

    Args:
        end: The socket to the supervisor.
        record: The file for the faults; None to write none.
    """
    nvml = load()
    if nvml is None:
        return
    gpus = find_gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    watcher = _GpuWatcher(nvml, gpus, end, record)
    threading.Thread(target=watcher.wait_for_events, daemon=True).start()
    while end.recv(1):
        watcher.answer()


class _GpuWatcher:
    """Watches GPUs for Xids, keeps their faults so far, and sends them to the supervisor.

    Args:
        nvml: The module ``pynvml``.
        gpus: The GPUs that :func:`find_gpus` has returned.
        end: The socket to the supervisor.
        record: The file for the faults; None to write none.
    """

    def __init__(self, nvml: Any, gpus: list[Gpu], end: socket.socket, record: Path | None) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._end = end
        self._seen: list[tuple[float, GpuFault]] = []
        self._recorded = set[tuple[int, str, str]]()
        self._lock = threading.Lock()
        self._file = _open_record(record)
        # Register first, so that an Xid that happens while the states are read is seen.
        self._events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            # Registering fails for a GPU that reports no Xids, or not to this user. Such a GPU is
            # still asked for the faults that last.
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(
                    gpu.handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )
        self._before = [state_of(nvml, gpu) for gpu in gpus]

    def wait_for_events(self) -> None:
        """Note each Xid, and tell the supervisor at once of a hardware fault."""
        nvml = self._nvml
        while True:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, _WAIT)
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError:
                # One of the GPUs is lost, or needs a reset. The others may still have events.
                self._tell(self._what_stays())
                time.sleep(_PAUSE)
                continue
            fault = fault_of_event(nvml, self._gpus, event)
            if fault is None:
                continue
            with self._lock:
                self._seen.append((time.monotonic(), fault))
            self._tell([fault])

    def answer(self) -> None:
        """Tell the supervisor of all present faults."""
        stays = self._what_stays()
        now = time.monotonic()
        with self._lock:
            xids = [
                fault
                for at, fault in self._seen
                if fault.kind == GpuFaultKind.HARDWARE.value or now - at <= _RECENT
            ]
        # The Xids come first, because they say more. Name an Xid only once that has come many
        # times.
        found = list(dict.fromkeys([*xids, *stays]))
        self._record(found)
        _send(self._end, found, is_answer=True)

    def _what_stays(self) -> list[GpuFault]:
        return [
            fault
            for gpu, before in zip(self._gpus, self._before, strict=True)
            for fault in faults_of(gpu, state_of(self._nvml, gpu), before)
        ]

    def _tell(self, faults: list[GpuFault]) -> None:
        news = self._record(faults)
        hardware = [each for each in news if each.kind == GpuFaultKind.HARDWARE.value]
        if hardware:
            _send(self._end, hardware, is_answer=False)

    def _record(self, faults: list[GpuFault]) -> list[GpuFault]:
        """Return those of the given faults that have not been recorded yet, and write them to the
        file if there is one.
        """
        with self._lock:
            news = []
            for fault in faults:
                key = (fault.index, fault.uuid, fault.what)
                if key not in self._recorded:
                    self._recorded.add(key)
                    news.append(fault)
            if self._file is not None and news:
                lines = "".join(map(_row, news))
                with contextlib.suppress(OSError):
                    os.write(self._file, lines.encode())
        return news


def _open_record(record: Path | None) -> int | None:
    """Empty the file for the faults and return its descriptor; None if it cannot be written."""
    if record is None:
        return None
    with contextlib.suppress(OSError):
        file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        os.write(file, GPU_FAULTS.header.encode())
        return file
    return None


def _row(fault: GpuFault) -> str:
    # A comma would begin another field, as these CSV files have no quoting.
    what = fault.what.replace(",", ";")
    return f"{time.time():.3f},{fault.uuid},{fault.index},{fault.kind},{fault.xid or ''},{what}\n"


def _send(end: socket.socket, faults: list[GpuFault], *, is_answer: bool) -> None:
    # A message has to fit into one packet, so send only the first faults, which say most.
    with contextlib.suppress(OSError):
        end.send(GpusSay(tuple(faults[:_MOST_FAULTS]), is_answer).encode())
