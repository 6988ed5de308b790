"""A rank that fails while the ranks still meet: its supervisor leaves after the others have been
told.
"""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

# It kills its own children, as a supervisor does, and so it is a process of its own.
PROGRAM = """
import subprocess, threading, time
from srunddp.errors import PeerError
from srunddp.supervisor import signals
from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.output.redirect import OutputRedirect, OutputTarget
from srunddp.supervisor.launcher import Launcher
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.supervisor import Supervisor
from srunddp.supervisor.worker_process import WorkerProcess, pipe

class Agent:
    has_failed = threading.Event()

    def rendezvous(self):
        self.has_failed.wait()
        time.sleep(1)  # so long does it take to tell the others
        raise PeerError("the others have been told", code=7)

    def abort_rendezvous(self, cause, exit_code):
        self.has_failed.set()

    def answered_probes(self):
        return 0

    def stop_sampler(self):
        pass

    def agent_store(self):
        return None

signals.block()
worker = subprocess.Popen(["false"])
ours, theirs = pipe()
supervisor = Supervisor(
    agent=Agent(),
    recorder=FailureRecorder(0, "node01", StackDump(), None),
    process=WorkerProcess(worker.pid),
    pipe=ours,
    output=OutputRedirect(OutputTarget(None, True, "")),
    grace=0.0,
    restart_grace=0.0,
    launcher=Launcher(None),
)
try:
    supervisor.run()
except PeerError as error:
    print(error, error.exit_code)
"""


def test_a_supervisor_leaves_after_the_others_have_been_told() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "the others have been told 7\n"), done.stderr
