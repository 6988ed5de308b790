"""The ways in which a rank of these programs can fail, and the plan that says which rank fails how
and when.

The plan is the JSON in the variable CHAOS; tests.chaos.run writes it. Every moment is
time.monotonic(), which all nodes of the test cluster share.
"""

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
NODE = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
MARGIN = 64 << 20


def _exception() -> None:
    raise ValueError("boom")


def _supervisor() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    _sleep()


def _memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MARGIN, used + MARGIN))
    bytearray(16 * MARGIN)


def _bad_alloc() -> None:
    # C++'s operator new; nothing above catches what it throws, and the process aborts.
    new = ctypes.CDLL("libstdc++.so.6")._Znwm
    new.argtypes = (ctypes.c_size_t,)
    new(1 << 62)


def _hold_gil() -> None:
    pause = ctypes.PyDLL(None).pause
    while True:
        pause()


def _sleep() -> None:
    while True:
        time.sleep(3600)


KINDS: dict[str, Callable[[], object]] = {
    "exception": _exception,
    "exit3": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(9),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "supervisor": _supervisor,
    "segv": lambda: ctypes.string_at(0),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "memory": _memory,
    "bad_alloc": _bad_alloc,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": _sleep,
    "gil": _hold_gil,
}


class Plan:
    """What this rank is to do, and the folder in which it says how far it is."""

    def __init__(self) -> None:
        plan = json.loads(os.environ["CHAOS"])
        self.folder = Path(plan["folder"])
        self.torch: bool = plan["torch"]
        self.peers: str = plan["peers"]
        self.steps: int = plan["steps"]
        self.pace: float = plan["pace"]
        self.heartbeat: bool = plan["heartbeat"]
        self._mine: list[dict[str, Any]] = [
            fault for fault in plan["faults"] if fault["rank"] == RANK
        ]
        self._ignores_term = plan["stubborn"] and not self._mine
        self._children = plan["children"]

    def begin(self) -> None:
        """At the top of the script."""
        if self._ignores_term:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._children:
            # Forked, as a DataLoader's workers are, and started, as a download or a logger is.
            multiprocessing.get_context("fork").Process(target=_sleep, daemon=True).start()
            # Nobody is left to end this one where the supervisor is killed.
            if not any(fault["kind"] == "supervisor" for fault in self._mine):
                subprocess.Popen(["sleep", "3600"])
        atexit.register(self.at, "atexit")
        self.at("import")

    def at(self, phase: str) -> None:
        """Fail, if that is the plan."""
        for fault in self._mine:
            if fault["phase"] == phase:
                time.sleep(fault["delay"])
                self._fail(fault["kind"])

    def ready(self) -> None:
        """Training begins."""
        self.say("ready")
        self._began = self._reported = time.monotonic()
        self._made = 0

    def step(self) -> bool:
        """Between two steps; False when they are over."""
        for fault in self._mine:
            if fault["phase"] == "training" and time.monotonic() >= self._began + fault["delay"]:
                self._fail(fault["kind"])
        if self.heartbeat:
            import srunddp

            srunddp.heartbeat()
        time.sleep(self.pace)
        self._made += 1
        if time.monotonic() > self._reported + 1.0:
            self._reported = time.monotonic()
            self.say("steps", steps=self._made)
        return self._made < self.steps

    def say(self, what: str, **more: object) -> None:
        """Tell the runner, in a file that appears whole."""
        now = time.monotonic()
        pid = os.getpid()
        supervisor = os.getppid()
        text = json.dumps(
            {"time": now, "pid": pid, "supervisor": supervisor, "rank": RANK, "node": NODE, **more}
        )
        new = self.folder / f".{what}.{RANK}"
        with contextlib.suppress(FileNotFoundError):  # the runner has gone
            new.write_text(text)
            new.rename(self.folder / f"{what}.{RANK}")

    def _fail(self, kind: str) -> None:
        self.say("failed")
        KINDS[kind]()
