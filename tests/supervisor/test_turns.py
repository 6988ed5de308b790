"""What a supervisor does in one turn of its loop, with a real worker and a made-up failure monitor.

Each program is a process of its own, as a supervisor kills its own children.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.conftest import ROOT

PROGRAM = """
import json, os, signal, socket, subprocess, sys, threading, time
from srunddp.errors import SrunddpError
from srunddp.supervisor import signals
from srunddp.supervisor.clock import ActiveClock
from srunddp.supervisor.failure_monitor import FailureMonitor
from srunddp.supervisor.limits import Limits
from srunddp.supervisor.output.redirect import OutputRedirect, OutputTarget
from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.root_cause import RootCause
from srunddp.supervisor.launcher import Launcher
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.supervisor import Supervisor
from srunddp.supervisor.worker_messages import ScriptHasFailed, StartedMpi
from srunddp.supervisor.worker_process import WorkerProcess, pipe

class Agent:
    monitor = FailureMonitor(None)
    never = threading.Event()

    def rendezvous(self):
        if self.monitor is None:
            self.never.wait()
        return StartedMpi(), self.monitor

    def abort_rendezvous(self, cause, exit_code): pass
    def on_rendezvous(self): pass
    def announce_termination(self): pass
    def answered_probes(self): return 0
    def stop_sampler(self): pass
    def agent_store(self): return None

class CountingClock(ActiveClock):
    turns = 0

    def advance(self, asked):
        self.turns += 1
        return super().advance(asked)

def supervise(worker, agent, ours, limits=Limits(), launcher=Launcher(None)):
    clock = CountingClock()
    supervisor = Supervisor(
        agent=agent,
        recorder=FailureRecorder(1, "node02", StackDump(), None, limits),
        process=WorkerProcess(worker, limits=limits),
        pipe=ours,
        output=OutputRedirect(OutputTarget(None, True, "")),
        grace=0.0,
        restart_grace=0.0,
        launcher=launcher,
        limits=limits,
        clock=clock,
    )
    try:
        code = supervisor.run()
    except SrunddpError as error:
        code = error.exit_code
    remaining = sorted(supervisor.remaining)
    said = {"code": code, "took": clock.now, "turns": clock.turns, "remaining": remaining}
    print(json.dumps(said))

signals.block()
ours, theirs = pipe()
agent = Agent()
"""


def ran(program: str) -> tuple[dict[str, Any], str]:
    """What a program says of its supervisor, and what that has printed."""
    command = [sys.executable, "-c", PROGRAM + program]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


IN_A_TICK = """
class Monitor(FailureMonitor):
    # As where a lease is over, of which no socket tells: the wait that it asks for is long.
    def tick(self, now):
        self.root_cause = RootCause((0,), "node01", "no answer", 69)
        self.fenced = True
        return 20.0

agent.monitor = Monitor(None)
supervise(subprocess.Popen(["cat"], stdin=-1).pid, agent, ours)
"""


def test_a_verdict_that_a_time_brings_is_obeyed_at_once() -> None:
    """With spare nodes others go on 3 s after a lease is over, whatever else there is to wait
    for.
    """
    said, _ = ran(IN_A_TICK)
    assert said["code"] == 69
    assert said["took"] < 10.0


LAST_WORDS = """
class Monitor(FailureMonitor):
    def fail(self, failure, now):
        print(failure.cause, file=sys.stderr)
        super().fail(failure, now)

agent.monitor = Monitor(None)
# The worker ends between the end of the wait and the reading of the signals.
read = signals.read

def late():
    if os.path.exists("/proc/self/fd/%d" % gate.fileno()):
        gate.close()
        while os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            time.sleep(0.01)
    return read()

gate, other = socket.socketpair()
worker = os.fork()
if worker == 0:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, range(1, 32))
    gate.close()
    other.recv(1)  # until the supervisor reads its signals
    theirs.send(ScriptHasFailed("ValueError: boom", 7, 0, "other", "", False))
    os._exit(7)
other.close()
theirs.end.close()
signals.read = late
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGCONT)).start()
supervise(worker, agent, ours)
"""


def test_what_a_worker_has_said_counts_before_its_end() -> None:
    """Its cause, and not that of its exit code."""
    said, errors = ran(LAST_WORDS)
    assert said["code"] == 7
    assert errors == "ValueError: boom\n"


GIVEN_UP = """
# A launcher that ends, a rendezvous that cannot be interrupted, and a worker that takes its time.
agent.monitor = None
command = ["env", "--ignore-signal=TERM", "sh", "-c", "echo ready; cat"]
worker = subprocess.Popen(command, stdin=-1, stdout=-1)
assert worker.stdout.readline() == b"ready\\n"
launcher = subprocess.Popen(["true"])
limits = Limits(rendezvous_ends_within=0.1, kill_after=2.0)
supervise(worker.pid, agent, ours, limits, Launcher(launcher.pid))
"""


def test_whoever_gives_the_rendezvous_up_waits_for_its_worker_at_rest() -> None:
    said, _ = ran(GIVEN_UP)
    assert said["code"] == 137
    assert said["took"] > 1.9
    assert said["turns"] < 20


STORE_HANGS = """
from srunddp.supervisor.agent_store import AgentStore
from srunddp.supervisor.descendants import Descendants

class Store(AgentStore):
    # As where its kernel call does not return, even after SIGKILL.
    def close(self):
        return False

class Kill:
    def __call__(self, given_up):
        print(given_up, file=sys.stderr)
        return given_up | {7}

store = Store(socket.create_server(("127.0.0.1", 0)), "127.0.0.1", 1)
agent.agent_store = lambda: store
agent.monitor.root_cause = RootCause((0,), "node01", "no answer", 69)
Descendants.kill = Kill()
store.process = 4711
supervise(subprocess.Popen(["cat"], stdin=-1).pid, agent, ours)
"""


def test_an_agent_store_that_cannot_be_killed_holds_no_end_and_no_restart_up() -> None:
    """As it has no memory of the worker's, nor a GPU's. What the worker has left does."""
    said, errors = ran(STORE_HANGS)
    assert errors == "{4711}\n"
    assert said["remaining"] == [7]
