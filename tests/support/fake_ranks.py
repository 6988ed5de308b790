"""Runs a job of thousands of ranks: with the real rendezvous and supervisor of rank 0, and a few
processes that play all other ranks.

``python -m tests.support.fake_ranks RANKS RESTARTS`` runs rank 0.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from srunddp import __version__
from srunddp.bootstrap.rendezvous import protocol
from srunddp.bootstrap.rendezvous.auth import choose_authenticator
from srunddp.bootstrap.rendezvous.messages import Hello
from srunddp.bootstrap.rendezvous.protocol import Address
from srunddp.bootstrap.rendezvous.server import RendezvousServer
from srunddp.supervisor import signals
from srunddp.supervisor.connection import SupervisorConnection
from srunddp.supervisor.coordinator import Coordinator
from srunddp.supervisor.failure_monitor import RankContext
from srunddp.supervisor.launcher import Launcher
from srunddp.supervisor.output.redirect import OutputRedirect, OutputTarget
from srunddp.supervisor.recorder import FailureRecorder
from srunddp.supervisor.restart import RestartPolicy, Starts
from srunddp.supervisor.stacks import StackDump
from srunddp.supervisor.supervisor import RendezvousOutcome, Supervisor
from srunddp.supervisor.worker_process import WorkerProcess, pipe
from srunddp.util.kernel_file import raise_open_files_limit
from tests.conftest import ROOT
from tests.support.cost import cpu_of

HOST = "127.0.0.1"
TOKEN = "4711.0"
PER_NODE = 8
PROCESSES = 2


def hello(rank: int, size: int) -> Hello:
    """Return the hello of a rank. The nodes have :data:`PER_NODE` ranks and one address each."""
    number, local_rank = divmod(rank, PER_NODE)
    address = f"127.1.{number // 250}.{number % 250 + 1}" if rank else HOST
    return Hello(
        TOKEN,
        rank,
        size,
        local_rank,
        f"node{number:05d}",
        address,
        1000 + rank,
        "0-15",
        PER_NODE,
        __version__,
    )


@dataclass(frozen=True)
class Cost:
    """What something cost until the last rank had done it.

    Attributes:
        wall: Seconds.
        cpu: Seconds of CPU time of the measured process, which is rank 0.
    """

    wall: float
    cpu: float


class Processes:
    """A process that is measured, and some processes that play its peers. As a context manager it
    kills all of them at the end of the block.

    Args:
        module: The module that the measured process runs.
        words: The arguments of the module.
    """

    def __init__(self, module: str, *words: object) -> None:
        self.measured = start(module, *words)
        self.players: list[Any] = []

    def play(self, module: str, words: Sequence[object], numbers: range) -> None:
        """Start the processes that play the peers, each for a part of the peers, and wait until
        they are ready.

        Args:
            module: The module that they run.
            words: The first arguments of the module; the first number and the end of a process's
                part follow.
            numbers: The numbers of all peers.
        """
        bounds = [numbers.start + len(numbers) * part // PROCESSES for part in range(PROCESSES + 1)]
        self.players = [start(module, *words, *pair) for pair in itertools.pairwise(bounds)]
        self.answers()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.measured, *self.players):
            process.kill()
            process.wait()

    def say(self, line: str) -> Cost:
        """Send a line to all players. Return the time before that, and the CPU time that the
        measured process had used by then.
        """
        began = self.now()
        for process in self.players:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return began

    def answers(self) -> list[dict[str, Any]]:
        """Read one line from each player."""
        return list(map(read, self.players))

    def now(self) -> Cost:
        """Return the time, and the CPU time that the measured process has used."""
        return Cost(time.monotonic(), cpu_of(self.measured.pid))

    def since(self, began: Cost, answers: Iterable[dict[str, Any]]) -> Cost:
        """Return the cost from ``began`` until the last of the answers."""
        return Cost(
            max(answer["at"] for answer in answers) - began.wall, self.now().cpu - began.cpu
        )


class FakeJob(Processes):
    """Rank 0, and the processes that play the other ranks of its job.

    Args:
        ranks: The number of all ranks.
        restarts: How often the run may restart.
    """

    def __init__(self, ranks: int, restarts: int = 0) -> None:
        super().__init__("tests.support.fake_ranks", ranks, restarts)
        published = read(self.measured)["published"]
        self.play("tests.support.fake_supervisors", (published, ranks), range(1, ranks))

    def meet(self) -> Cost:
        """Have all other ranks connect at once to rank 0, which listens already. Return the cost
        of the rendezvous.
        """
        return self._until_met(self.say("meet"))

    def fail(self, culprit: int, *, restarts: bool = False) -> tuple[Cost, set[int], Cost | None]:
        """Have a rank fail.

        Args:
            culprit: The rank that fails.
            restarts: Whether the run restarts then.

        Returns:
            The cost until all ranks have the verdict, the exit codes in it, and the cost until all
            ranks have met again; None for this last cost without a restart.
        """
        began = self.say(f"fail {culprit}")
        answers = self.answers()
        verdict = self.since(began, answers)
        codes = {code for answer in answers for code in answer["codes"]}
        return verdict, codes, self._until_met(began) if restarts else None

    def idle(self, seconds: float) -> Cost:
        """Wait while nothing happens, and return what that costs."""
        began = self.now()
        time.sleep(seconds)
        return self.since(began, [{"at": time.monotonic()}])

    def finish(self) -> tuple[int, str]:
        """Wait until rank 0 has ended. Return its exit code, and what it wrote to standard
        error.
        """
        errors = self.measured.communicate(timeout=30)[1]
        return self.measured.returncode, errors

    def _until_met(self, began: Cost) -> Cost:
        answers = self.answers()
        read(self.measured)  # from now on rank 0 watches all connections
        return self.since(began, answers)


def start(module: str, *words: object) -> Any:
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True)


def read(process: Any) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return dict(json.loads(line))


def tell(**what: object) -> None:
    print(json.dumps(what), flush=True)


class Agent:
    """The agent of rank 0, without a sampler. A restart takes place in this same process, without
    execve().
    """

    def __init__(self, size: int, restarts: int) -> None:
        self.size = size
        self.restarts = restarts
        self.published = self.listen()
        self.history = Starts()

    def listen(self) -> str:
        self.listening = protocol.listen(HOST, [0])
        return protocol.encode_advertisement(TOKEN, [Address(*self.listening.getsockname())])

    def rendezvous(self) -> RendezvousOutcome:
        held = protocol.bind_store(HOST, self.listening, [0])
        trust = choose_authenticator(protocol.decode_advertisement(self.published).secret)
        server = RendezvousServer(own=hello(0, self.size), held=held, channel="pmi2", trust=trust)
        found = server.accept_all(time.monotonic() + 300.0)
        held.store.close()
        self.policy = RestartPolicy(self.restarts, self.history, self.listen, lambda: True)
        context = RankContext(
            rank=0,
            node=found.nodes[0],
            nodes=found.nodes,
            stall_timeout=300.0,
            step=lambda: 0,
            stacks=lambda: "",
            link_is_up=lambda: True,
            restarts=self.policy if self.restarts else None,
        )
        connections = {rank: SupervisorConnection(each) for rank, each in found.connections.items()}
        self.meeting = found.meeting
        return found.meeting, Coordinator(context, connections)

    def on_rendezvous(self) -> None:
        tell(nnodes=self.meeting.nnodes)

    def abort_rendezvous(self, cause: str, exit_code: int) -> None: ...

    def announce_termination(self) -> None: ...

    def answered_probes(self) -> int:
        return 0

    def stop_sampler(self) -> None: ...

    def agent_store(self) -> None: ...


def supervise(agent: Agent) -> tuple[int, str | None]:
    ours, _theirs = pipe()
    worker = subprocess.Popen(["cat"], stdin=-1)  # ends with this process
    supervisor = Supervisor(
        agent=agent,
        recorder=FailureRecorder(0, hello(0, 1).node, StackDump(), None),
        process=WorkerProcess(worker.pid),
        pipe=ours,
        output=OutputRedirect(OutputTarget(None, True, "")),
        grace=0.0,
        restart_grace=0.0,
        launcher=Launcher(None),
    )
    return supervisor.run(), supervisor.restart


def main(size: int, restarts: int) -> int:
    raise_open_files_limit()
    signals.block()
    agent = Agent(size, restarts)
    tell(published=agent.published)
    while True:
        code, published = supervise(agent)
        if published is None:
            return code
        agent.published = published
        agent.history = agent.policy.history


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
