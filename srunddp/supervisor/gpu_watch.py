"""A process that asks NVML whether this node's GPUs are healthy, and its supervisor's side.

NVML tells of an Xid only to who had registered before it happened. So with ``--monitor`` or
``--restarts`` the first rank of each node has such a process from its start to its end. Without
these options a process is forked at a failure, and finds what stays.

The supervisor never asks NVML itself: after a fault the driver may not answer, and then only this
process hangs. Nor does the supervisor import this module on a node without GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

from srunddp.supervisor.clock import Clock
from srunddp.supervisor.failure import GpuFault, GpuFaultKind
from srunddp.supervisor.limits import DEFAULT_LIMITS, Limits
from srunddp.supervisor.signals import die_with_parent
from srunddp.supervisor.worker_process import wait_for_child
from srunddp.util.descriptors import close_all, opened
from srunddp.util.messages import Message
from srunddp.util.quick_dataclass import dataclass

NAME = "srunddp-gpus"  # at most 15 letters, all that Linux keeps
_LONGEST = 1 << 16
_MOST_FAULTS = 32  # of one message, which has to fit into one packet
_WAIT = 60_000  # milliseconds that NVML waits for an event; the process can be ended meanwhile
_PAUSE = 1.0  # seconds after an error of NVML, which may come again at once
# Seconds for which an Xid that is no fault of the hardware counts as near a failure. A program may
# have handled an older one.
_RECENT = 60.0


class GpuMessage(Message):
    """A message of the process to its supervisor."""


@dataclass(frozen=True)
class GpusSay(GpuMessage, kind="gpus_say"):
    """What is wrong with this node's GPUs.

    Attributes:
        faults: The faults.
        is_answer: Whether this is all that is wrong, because the supervisor has asked. Else it is
            a new fault.
    """

    faults: tuple[GpuFault, ...]
    is_answer: bool


@dataclass
class NodeGpus:
    """The GPUs of this node, as a supervisor asks for their health.

    Attributes:
        own: The process ids of the supervisor's own children, to which those made here are added.
        limits: How long an answer may take.
        clock: The clock of these limits.
        pid: The process that answers; None if there is none now.
    """

    own: set[int] = field(default_factory=set)
    limits: Limits = DEFAULT_LIMITS
    clock: Clock = time.monotonic
    pid: int | None = None
    _socket: socket.socket | None = None
    _news: list[GpuFault] = field(default_factory=list)
    _answer: tuple[GpuFault, ...] | None = None
    _ends_at: float = 0.0

    def watch(self, record: Path | None) -> None:
        """Fork the process that registers for Xids. To be called before there are threads, with all
        signals blocked.

        Args:
            record: The file for the faults; None to write none.
        """
        self._fork(lambda end: _watch(end, record))

    def in_worker(self) -> None:
        """Close the socket, in a process that the supervisor has forked."""
        if self._socket is not None:
            self._socket.close()

    def ask(self) -> None:
        """Ask what is wrong with the GPUs now; :meth:`look` has the answer."""
        self._read()  # so that one which has ended is noticed
        self._answer = None
        self._ends_at = self.clock() + self.limits.gpus_answer_within
        if self._socket is None:
            self._fork(_answer_once)
        if self._socket is None:
            self._answer = ()
            return
        try:
            self._socket.send(b"?")
        except OSError:  # it has ended
            self._close()
            self._answer = ()

    def look(self) -> tuple[GpuFault, ...] | None:
        """Return the answer; None if it may still come."""
        self._read()
        if self._answer is None and self.clock() >= self._ends_at:
            # It may hang in the driver for ever.
            self._kill()
            self._answer = ()
        return self._answer

    def news(self) -> tuple[GpuFault, ...]:
        """Return the faults of the hardware since the last call, without waiting."""
        self._read()
        found = tuple(self._news)
        self._news.clear()
        return found

    def stop(self) -> None:
        """End the process, if there is one."""
        self._close()
        # It writes nothing that is still needed, and it may hang in the driver.
        self._kill()

    def _read(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(_LONGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # Without an answer it has found no NVML, or was killed.
                self._close()
                self._answer = self._answer or ()
                return
            message = GpuMessage.decode(data)
            if not isinstance(message, GpusSay):
                continue
            if message.is_answer:
                self._answer = message.faults
            else:
                self._news += message.faults

    def _fork(self, serve: Callable[[socket.socket], None]) -> None:
        """Fork a process, unless the kernel makes none now.

        Args:
            serve: What the process does, with its end of the socket.
        """
        self._kill()  # one that has ended by itself has not been waited for
        supervisor = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with warnings.catch_warnings():
                # Python warns of a fork while other threads run. If the child waits for a lock of
                # theirs, it is killed when its time is over.
                warnings.simplefilter("ignore")
                pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return
        if pid == 0:
            _run(supervisor, theirs, serve)
        theirs.close()
        self.own.add(pid)
        self.pid = pid
        self._socket = ours

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _kill(self) -> None:
        self._close()
        # It may have been reaped, and then another process may have its id.
        if self.pid is not None and wait_for_child(self.pid, 0.0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            wait_for_child(self.pid, self.limits.gpus_killed_within)
        self.pid = None


def _run(supervisor: int, end: socket.socket, serve: Callable[[socket.socket], None]) -> NoReturn:
    """Do the work of the process, and end it."""
    try:
        die_with_parent(supervisor)
        # Launchers send signals to the whole group or step.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(NAME)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        # If this process hangs, nobody may miss the end of a connection that it has inherited.
        close_all([each for each in opened() if each > 2 and each != end.fileno()])
        serve(end)
    finally:
        # Never return into the supervisor's code: its exit handlers must not run twice.
        os._exit(0)


def _answer_once(end: socket.socket) -> None:
    """Answer one question by what NVML shows now."""
    from srunddp.supervisor import gpu_health

    if end.recv(1):
        _send(end, gpu_health.look(os.environ.get("CUDA_VISIBLE_DEVICES")), is_answer=True)


def _watch(end: socket.socket, record: Path | None) -> None:
    """Register for Xids, and answer until the supervisor closes its end or ends."""
    from srunddp.supervisor import gpu_health

    nvml = gpu_health.load()
    if nvml is None:
        return
    gpus = gpu_health.find_gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    watch = _Watch(nvml, gpus, end, record)
    threading.Thread(target=watch.wait_for_events, daemon=True).start()
    while end.recv(1):
        watch.answer()


class _Watch:
    """What the process knows of the GPUs.

    Args:
        nvml: The module ``pynvml``.
        gpus: The GPUs, by :func:`srunddp.supervisor.gpu_health.find_gpus`.
        end: The socket to the supervisor.
        record: The file for the faults; None to write none.
    """

    def __init__(self, nvml: Any, gpus: list[Any], end: socket.socket, record: Path | None) -> None:
        from srunddp.supervisor import gpu_health

        self._nvml = nvml
        self._gpus = gpus
        self._end = end
        self._health = gpu_health
        self._seen: list[tuple[float, GpuFault]] = []
        self._recorded = set[tuple[int, str, str]]()
        self._lock = threading.Lock()
        self._file = _open_record(record)
        # Register first: what happens while the states are read is then seen.
        self._events = nvml.nvmlEventSetCreate()
        for gpu in gpus:
            # A GPU that tells of no Xid, or not to this user, is asked for what stays.
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(
                    gpu.handle, nvml.nvmlEventTypeXidCriticalError, self._events
                )
        self._before = [gpu_health.state_of(nvml, gpu) for gpu in gpus]

    def wait_for_events(self) -> None:
        """Note each Xid, and tell the supervisor at once of a fault of the hardware."""
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
            fault = self._health.fault_of_event(nvml, self._gpus, event)
            if fault is None:
                continue
            with self._lock:
                self._seen.append((time.monotonic(), fault))
            self._tell([fault])

    def answer(self) -> None:
        """Tell the supervisor all that is wrong now."""
        stays = self._what_stays()
        now = time.monotonic()
        with self._lock:
            xids = [
                fault
                for at, fault in self._seen
                if fault.kind == GpuFaultKind.HARDWARE.value or now - at <= _RECENT
            ]
        # The Xids first: they say more. An Xid may come many times.
        found = list(dict.fromkeys([*xids, *stays]))
        self._record(found)
        _send(self._end, found, is_answer=True)

    def _what_stays(self) -> list[GpuFault]:
        health = self._health
        return [
            fault
            for gpu, before in zip(self._gpus, self._before, strict=True)
            for fault in health.faults_of(gpu, health.state_of(self._nvml, gpu), before)
        ]

    def _tell(self, faults: list[GpuFault]) -> None:
        news = self._record(faults)
        hardware = [each for each in news if each.kind == GpuFaultKind.HARDWARE.value]
        if hardware:
            _send(self._end, hardware, is_answer=False)

    def _record(self, faults: list[GpuFault]) -> list[GpuFault]:
        """Write to the file what is new, and return it."""
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
    from srunddp.util.sample_files import GPU_FAULTS

    with contextlib.suppress(OSError):
        file = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        os.write(file, GPU_FAULTS.header.encode())
        return file
    return None


def _row(fault: GpuFault) -> str:
    # The CSV files have no quoting.
    what = fault.what.replace(",", ";")
    return f"{time.time():.3f},{fault.uuid},{fault.index},{fault.kind},{fault.xid or ''},{what}\n"


def _send(end: socket.socket, faults: list[GpuFault], *, is_answer: bool) -> None:
    # What comes first says most, and a message has to fit into one packet.
    with contextlib.suppress(OSError):
        end.send(GpusSay(tuple(faults[:_MOST_FAULTS]), is_answer).encode())
