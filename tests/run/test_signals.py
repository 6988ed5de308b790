"""Signals do below srunddp what they do to plain Python: those that are sent to a process group by
a command, a wrapper or the script itself, and those of a terminal.

Each test runs the same twice and compares what the script has written, and how it has ended.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from srunddp.util.kernel_file import children_of, stat_fields
from tests.conftest import PROGRAMS
from tests.support.starting import (
    SRUNDDP,
    bare,
    ended,
    slurm,
    started,
    until,
    workers_of,
    write,
)
from tests.support.worlds import world

PROGRAM = PROGRAMS / "signalled.py"
COMMANDS = {"plain": [sys.executable], "srunddp": [*SRUNDDP, "--quiet"]}
# A second delivery comes 0.05 s after the first: see Limits.signal_settles.
SETTLED = 0.5


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def is_ready(file: Path) -> bool:
    return "ready" in lines(file)


def has_count(file: Path, line: str, times: int) -> bool:
    return lines(file).count(line) >= times


@dataclass
class Outcome:
    """How one script has fared.

    Attributes:
        lines: What it has written.
        status: The exit code of the command, or minus the number of a signal.
    """

    lines: list[str]
    status: int | None = None


@contextmanager
def group(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own."""
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=bare(), stdin=null, stdout=null, stderr=null, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def as_timeout(pid: int) -> None:
    """As timeout(1) does."""
    os.kill(pid, signal.SIGINT)
    os.killpg(pid, signal.SIGINT)


SENDERS: dict[str, Callable[[int], None]] = {
    "the process": lambda pid: os.kill(pid, signal.SIGINT),
    "the process group": lambda pid: os.killpg(pid, signal.SIGINT),
    "timeout": as_timeout,
}


@pytest.mark.parametrize("sender", SENDERS)
def test_one_interrupt_comes_once(sender: str, tmp_path: Path) -> None:
    """A second one would break off what the first one's handler saves."""
    outcomes = {}
    for kind, command in COMMANDS.items():
        file = tmp_path / kind
        with group(*command, PROGRAM, "save", file) as process:
            until(partial(is_ready, file))
            SENDERS[sender](process.pid)
            outcomes[kind] = Outcome(lines(file), process.wait(60))
            outcomes[kind].lines = lines(file)
    once = Outcome(["ready", "interrupted", "saved"], -signal.SIGINT)
    # timeout's two may reach plain Python so late one after the other that it handles both.
    assert outcomes["plain"] == once or sender == "timeout"
    assert outcomes["srunddp"] == once


@pytest.mark.parametrize(
    "number",
    [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT],
    ids=lambda number: number.name,
)
@pytest.mark.parametrize("to_group", [False, True])
def test_each_signal_comes_once(number: signal.Signals, to_group: bool, tmp_path: Path) -> None:
    outcomes = {}
    for kind, command in COMMANDS.items():
        file = tmp_path / kind
        with group(*command, PROGRAM, "record", file) as process:
            until(partial(is_ready, file))
            for times in (1, 2):
                (os.killpg if to_group else os.kill)(process.pid, number)
                until(partial(has_count, file, number.name, times))
                time.sleep(SETTLED)
            write(file.with_name(f"{kind}.end"), "")
            status = process.wait(60)
            outcomes[kind] = Outcome(lines(file), status)
    assert outcomes["plain"] == Outcome(["ready", number.name, number.name], 0)
    assert outcomes["srunddp"] == outcomes["plain"]


@pytest.mark.parametrize("trap", ["kill -INT 0", "kill -INT $!"])
def test_a_wrapper_s_trap_comes_once(trap: str, tmp_path: Path) -> None:
    # A shell lets its background jobs ignore SIGINT. Two waits, as a trap ends the first one.
    wrapper = (
        f"trap '' INT; trap '{trap}' USR1; env --default-signal=INT \"$@\" &"
        " wait $!; wait $!; exit $?"
    )
    outcomes = {}
    for kind, command in COMMANDS.items():
        file = tmp_path / kind
        with group("bash", "-c", wrapper, "bash", *command, PROGRAM, "save", file) as process:
            until(partial(is_ready, file))
            process.send_signal(signal.SIGUSR1)
            outcomes[kind] = Outcome([], process.wait(60))
            outcomes[kind].lines = lines(file)
    assert outcomes["plain"].lines == ["ready", "interrupted", "saved"]
    assert outcomes["srunddp"] == outcomes["plain"]


def test_what_a_script_sends_to_its_own_group_is_its_own(tmp_path: Path) -> None:
    outcomes = {}
    for kind, command in COMMANDS.items():
        file = tmp_path / kind
        with group(*command, PROGRAM, "group", file) as process:
            outcomes[kind] = Outcome([], process.wait(60))
            outcomes[kind].lines = lines(file)
    assert outcomes["plain"] == Outcome(["ready", "goes on"], 0)
    assert outcomes["srunddp"] == outcomes["plain"]


ASKS_NOBODY = {
    "itself": "os.kill(os.getpid(), signal.SIGTERM)",
    "its group": "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.killpg(0, signal.SIGTERM);"
    " time.sleep(0.5); raise ValueError('boom')",
    "its group, from a child": "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    " child = os.fork() or (os.killpg(0, signal.SIGTERM), time.sleep(0.5), os._exit(0));"
    " os.waitpid(child, 0); raise ValueError('boom')",
}


@pytest.mark.parametrize("receiver", ASKS_NOBODY)
def test_a_signal_of_the_script_s_own_asks_for_no_end_of_the_run(
    receiver: str, tmp_path: Path
) -> None:
    """torchrun restarts after any end of a worker."""
    script = write(
        tmp_path / "script.py",
        "import os, signal, time, srunddp\n"
        "if srunddp.restart_count():\n    raise SystemExit(0)\n"
        f"{ASKS_NOBODY[receiver]}\n",
    )
    done = subprocess.run(
        [*SRUNDDP, "--quiet", "--restarts", "1", script],
        env=bare(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda each: each.name)
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_of_somebody_else_s_that_ends_the_script_does(
    number: signal.Signals, to_group: bool, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    with group(*SRUNDDP, "--quiet", "--restarts", "1", PROGRAM, "sleep", file) as process:
        until(lambda: is_ready(file))
        (os.killpg if to_group else os.kill)(process.pid, number)
        assert process.wait(60) == 128 + number
    assert lines(file) == ["ready"]


# What stands in for torch takes until the test has seen it being imported.
STAND_IN = """
import time
from pathlib import Path
Path("importing").touch()
while not Path("go").exists():
    time.sleep(0.02)
"""
HANDLES_LATE = """
import torch
import signal, time
from pathlib import Path
def say(what):
    with open("said", "a") as file:
        file.write(what + "\\n")
time.sleep(0.5)  # the script may do anything before it sets its handler
signal.signal(signal.SIGUSR1, lambda *_: say("SIGUSR1"))
say("ready")
while not Path("end").exists():
    time.sleep(0.02)
"""


@contextmanager
def importing(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run whose script imports torch just now."""
    write(folder / "torch.py", STAND_IN)
    script = write(folder / "train.py", HANDLES_LATE)
    with group("env", "-C", folder, *SRUNDDP, "--quiet", script) as process:
        until((folder / "importing").exists)
        yield process


@pytest.mark.parametrize("to_group", [False, True])
def test_a_request_during_the_import_of_torch_waits_for_the_handler(
    to_group: bool, tmp_path: Path
) -> None:
    with importing(tmp_path) as process:
        (os.killpg if to_group else os.kill)(process.pid, signal.SIGUSR1)
        time.sleep(SETTLED)  # so that it comes while torch is imported
        (tmp_path / "go").touch()
        until(partial(has_count, tmp_path / "said", "SIGUSR1", 1))
        time.sleep(SETTLED)
        (tmp_path / "end").touch()
        assert process.wait(60) == 0
    assert lines(tmp_path / "said") == ["ready", "SIGUSR1"]


@pytest.mark.parametrize("to_group", [False, True])
def test_an_end_that_is_asked_for_does_not_wait(to_group: bool, tmp_path: Path) -> None:
    with importing(tmp_path) as process:
        (os.killpg if to_group else os.kill)(process.pid, signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert lines(tmp_path / "said") == []


@pytest.mark.parametrize("to_group", [False, True])
def test_a_request_while_the_ranks_meet_waits_for_the_handler(
    to_group: bool, tmp_path: Path
) -> None:
    script = write(tmp_path / "train.py", HANDLES_LATE.replace("import torch\n", ""))
    command = ("--quiet", script)
    with started(*command, folder=tmp_path, **slurm(0)) as first:
        until(lambda: workers_of(first.pid))
        (os.killpg if to_group else os.kill)(first.pid, signal.SIGUSR1)
        time.sleep(SETTLED)
        with started(*command, folder=tmp_path, **slurm(1)) as second:
            until(partial(has_count, tmp_path / "said", "SIGUSR1", 1))
            until(partial(has_count, tmp_path / "said", "ready", 2))
            (tmp_path / "end").touch()
            assert (ended(first)[0], ended(second)[0]) == (0, 0)
    assert sorted(lines(tmp_path / "said")) == ["SIGUSR1", "ready", "ready"]


SAY = """
import os, signal, subprocess, threading, time
def say(what):
    with open("said", "a") as file:
        file.write(what + "\\n")
def until_end():
    while not os.path.exists("end"):
        time.sleep(0.02)
"""
# What scripts do with USR1 that comes to the group while they import torch, as below plain Python.
AS_PLAIN = {
    "handled before the import": (
        "signal.signal(signal.SIGUSR1, lambda *_: say(f'import over: {os.path.exists(\"go\")}'))\n"
        "import torch\nuntil_end()\n",
        ["import over: False"],
    ),
    "blocked, with a thread that waits for it": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "threading.Thread(target=lambda: say(f'got {signal.sigwait({signal.SIGUSR1})}')).start()\n"
        "import torch\nuntil_end()\n"
        "say(f'blocked: {signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])}')\n",
        ["blocked: True", f"got {int(signal.SIGUSR1)}"],
    ),
    "ignored": (
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nimport torch\nuntil_end()\n"
        "say(f'{signal.getsignal(signal.SIGUSR1)!r}')\n",
        [f"{signal.SIG_IGN!r}"],
    ),
    "imported by a forked process": (
        "me = os.getpid()\nsignal.signal(signal.SIGUSR1,"
        " lambda *_: say(f'got by the child: {os.getpid() != me}'))\n"
        "child = os.fork()\nif not child:\n    import torch\nuntil_end()\n"
        "child and os.waitpid(child, 0)\n",
        ["got by the child: False", "got by the child: True"],
    ),
}


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("way", AS_PLAIN)
def test_a_script_s_own_way_with_a_signal_is_not_changed_by_the_import_of_torch(
    way: str, kind: str, tmp_path: Path
) -> None:
    text, expected = AS_PLAIN[way]
    write(tmp_path / "torch.py", STAND_IN)
    script = write(tmp_path / "train.py", SAY + text)
    with group("env", "-C", tmp_path, *COMMANDS[kind], script) as process:
        until((tmp_path / "importing").exists)
        os.killpg(process.pid, signal.SIGUSR1)
        time.sleep(SETTLED)
        (tmp_path / "go").touch()
        time.sleep(SETTLED)
        (tmp_path / "end").touch()
        assert process.wait(60) == 0
    assert sorted(lines(tmp_path / "said")) == expected


def test_a_request_during_the_import_waits_although_other_threads_run(tmp_path: Path) -> None:
    """As those of NumPy's BLAS do; the kernel may give a signal to any thread."""
    write(tmp_path / "torch.py", STAND_IN)
    script = write(
        tmp_path / "train.py",
        f"{SAY}threading.Thread(target=until_end).start()\nimport torch\n"
        "signal.signal(signal.SIGUSR1, lambda *_: say('got'))\nuntil_end()\n",
    )
    with group("env", "-C", tmp_path, *SRUNDDP, "--quiet", script) as process:
        until((tmp_path / "importing").exists)
        os.killpg(process.pid, signal.SIGUSR1)
        time.sleep(SETTLED)
        (tmp_path / "go").touch()
        until(partial(has_count, tmp_path / "said", "got", 1))
        (tmp_path / "end").touch()
        assert process.wait(60) == 0
    assert lines(tmp_path / "said") == ["got"]


def test_what_is_started_during_the_import_has_its_signals(tmp_path: Path) -> None:
    write(
        tmp_path / "torch.py",
        f"import subprocess\nchild = subprocess.Popen(['sleep', '60'])\n{STAND_IN}",
    )
    script = write(
        tmp_path / "train.py",
        f"{SAY}import torch\ntorch.child.send_signal(signal.SIGUSR1)\n"
        "say(str(torch.child.wait(30)))\n",
    )
    (tmp_path / "go").touch()
    with group("env", "-C", tmp_path, *SRUNDDP, "--quiet", script) as process:
        assert process.wait(60) == 0
    assert lines(tmp_path / "said") == [str(-signal.SIGUSR1)]


def test_whoever_signals_all_of_a_name_signals_the_script_once(tmp_path: Path) -> None:
    """As ``pkill -x`` and ``killall`` do."""
    file = tmp_path / "file"
    with group(*SRUNDDP, "--quiet", PROGRAM, "record", file) as process:
        until(partial(is_ready, file))
        pids = [process.pid, *children_of(process.pid)]
        names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in pids}
        for pid, name in names.items():
            if name == names[process.pid]:
                os.kill(pid, signal.SIGUSR1)
        until(partial(has_count, file, "SIGUSR1", 1))
        time.sleep(SETTLED)
        write(tmp_path / "file.end", "")
        assert process.wait(60) == 0
    assert lines(file) == ["ready", "SIGUSR1"]


def test_a_script_that_handles_ctrl_c_has_its_exit_code(tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.py",
        f"{SAY}try:\n    say('ready')\n    until_end()\n"
        "except KeyboardInterrupt:\n    raise SystemExit(130)\n",
    )
    with group("env", "-C", tmp_path, *SRUNDDP, "--quiet", script) as process:
        until(partial(is_ready, tmp_path / "said"))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130


# Stops and continuations.


@contextmanager
def job(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, and in our session: what belongs to no session of a
    shell is not stopped by SIGTSTP.
    """
    null = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=bare(), stdin=null, stdout=null, stderr=null, process_group=0
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("to", ["supervisor", "worker", "group"])
@pytest.mark.parametrize("between", [0.0, 0.02, 0.06, 0.5])
def test_what_is_continued_after_a_stop_goes_on(to: str, between: float, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with job(*SRUNDDP, "--quiet", PROGRAM, "record", file) as process:
        until(partial(is_ready, file))
        (worker,) = workers_of(process.pid)
        target = {"supervisor": process.pid, "worker": worker, "group": -process.pid}[to]
        os.kill(target, signal.SIGTSTP)
        time.sleep(between)
        os.kill(target, signal.SIGCONT)
        until(partial(has_count, file, "SIGCONT", 1))
        time.sleep(SETTLED)
        write(tmp_path / "file.end", "")
        assert process.wait(60) == 0


# What starts a rank in a process group of its own, as a shell does: SIGTSTP stops no other.
AS_SHELL = (
    "import subprocess, sys; sys.exit(subprocess.Popen(sys.argv[1:], process_group=0).wait() % 256)"
)


def test_ranks_that_their_launcher_stops_and_continues_are_not_blamed(tmp_path: Path) -> None:
    """Before ``scontrol suspend`` stops all processes by SIGSTOP, it sends SIGTSTP."""
    script = "say('works')\nwait_for('end')\n"
    below = {rank: [sys.executable, "-c", AS_SHELL] for rank in range(2)}
    with world(tmp_path, script, size=2, below=below, limits={"stopped_for": 1.0}) as it:
        until(lambda: it.has_said("works.0") and it.has_said("works.1"))
        # Not before: other children of a supervisor come and go while it starts.
        workers = it.workers()
        for number, state in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "S")):
            for worker in workers:
                os.killpg(os.getpgid(worker), number)
            until(partial(are_in_state, workers, state))
            time.sleep(4.0)
        (tmp_path / "end").touch()
        ended_world = it.wait()
    assert ended_world.codes == [0, 0], ended_world.text


def are_in_state(pids: list[int], state: str) -> bool:
    return {stat_fields(pid)[0] for pid in pids} == {state}


# Terminals.


class Terminal:
    """A terminal with an interactive shell in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = b""
        self.shell, self._master = pty.fork()
        if not self.shell:
            os.chdir(folder)
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], bare({"PS1": "> "}))
        self._is_closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Read what is printed, so that nobody waits for that."""
        with contextlib.suppress(OSError):
            while not self._is_closed:
                # A read that waits would keep the terminal open.
                if select.select([self._master], [], [], 0.05)[0]:
                    self.printed += os.read(self._master, 1 << 16)

    def type(self, text: str) -> None:
        """Type keys, such as ``\\x03`` for Ctrl-C."""
        os.write(self._master, text.encode())

    def hang_up(self) -> None:
        """Close the terminal, as when its window is closed."""
        if not self._is_closed:
            self._is_closed = True
            self._reader.join()
            os.close(self._master)

    def end(self) -> None:
        self.hang_up()
        # Each job of the shell is a process group of the shell's session.
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == self.shell:
                    os.kill(int(folder.name), signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.shell, 0)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    it = Terminal(tmp_path)
    yield it
    it.end()


def typed(kind: str, mode: str, file: Path) -> str:
    return " ".join(map(str, [*COMMANDS[kind], PROGRAM, mode, file]))


def has(terminal: Terminal, file: Path, *wanted: str) -> None:
    """Wait until these are the last lines of the file."""
    until(
        lambda: lines(file)[-len(wanted) :] == [*wanted],
        why=lambda: (lines(file), terminal.printed),
    )


@pytest.mark.parametrize("kind", COMMANDS)
def test_ctrl_c_ends_a_script_and_a_shell_s_loop(
    kind: str, terminal: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    command = typed(kind, "save", file)
    write(tmp_path / "loop.sh", f"for i in 1 2; do {command}; done\necho went on > after\n")
    terminal.type("bash loop.sh; echo $? > status\n")
    has(terminal, file, "ready")
    terminal.type("\x03")
    has(terminal, file, "ready", "interrupted", "saved")
    terminal.type("echo over > over\n")
    until(lambda: lines(tmp_path / "over"), why=lambda: terminal.printed)
    assert lines(file) == ["ready", "interrupted", "saved"]
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("of_script", [False, True])
def test_ctrl_z_stops_and_fg_goes_on(
    kind: str, of_script: bool, terminal: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    command = typed(kind, "record", file)
    if of_script:
        write(tmp_path / "job.sh", f"{command}\n")
        command = "bash job.sh"
    terminal.type(f"{command}; echo $? > status\n")
    has(terminal, file, "ready")
    terminal.type("\x1a")
    until(lambda: b"Stopped" in terminal.printed, why=lambda: terminal.printed)
    terminal.type("jobs > stopped\n")
    until(lambda: "Stopped" in "".join(lines(tmp_path / "stopped")))
    terminal.type("fg\n")
    has(terminal, file, "ready", "SIGCONT")
    time.sleep(SETTLED)
    write(tmp_path / "file.end", "")
    terminal.type("echo over > over\n")
    until(lambda: lines(tmp_path / "over"), why=lambda: terminal.printed)
    assert lines(file) == ["ready", "SIGCONT"]


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_script_that_handles_ctrl_z_is_not_stopped(
    kind: str, terminal: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    code = write(
        tmp_path / "handles.py",
        f"import signal, sys; sys.argv = ['', 'record', '{file}']\n"
        "signal.signal(signal.SIGTSTP, lambda *_: say('SIGTSTP'))\n"
        f"exec(open('{PROGRAM}').read())\n",
    )
    terminal.type(" ".join(map(str, [*COMMANDS[kind], code])) + "; echo $? > status\n")
    has(terminal, file, "ready")
    terminal.type("\x1a")
    has(terminal, file, "ready", "SIGTSTP")
    time.sleep(SETTLED)
    write(tmp_path / "file.end", "")
    until(lambda: lines(tmp_path / "status") == ["0"], why=lambda: terminal.printed)
    assert lines(file) == ["ready", "SIGTSTP"]


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_background_job_that_reads_is_stopped_and_reads_in_the_foreground(
    kind: str, terminal: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    terminal.type(f"{typed(kind, 'read', file)} &\n")
    has(terminal, file, "ready")

    def is_stopped() -> bool:
        (tmp_path / "jobs").unlink(missing_ok=True)
        terminal.type("jobs > jobs.new; mv jobs.new jobs\n")
        until((tmp_path / "jobs").exists, why=lambda: terminal.printed)
        return "Stopped" in "".join(lines(tmp_path / "jobs"))

    until(is_stopped, why=lambda: terminal.printed)
    terminal.type("fg\n")
    time.sleep(SETTLED)
    terminal.type("a line\n")
    has(terminal, file, "ready", "read a line")


@pytest.mark.parametrize("kind", COMMANDS)
def test_one_of_two_runs_in_a_script_reads_from_the_terminal(
    kind: str, terminal: Terminal, tmp_path: Path
) -> None:
    reading = tmp_path / "reading"
    other = tmp_path / "other"
    write(
        tmp_path / "job.sh",
        f"{typed(kind, 'sleep', other)} &\n{typed(kind, 'read', reading)} < /dev/tty &\nwait\n",
    )
    terminal.type("bash job.sh; echo $? > status\n")
    has(terminal, reading, "ready")
    has(terminal, other, "ready")
    terminal.type("a line\n")
    has(terminal, reading, "ready", "read a line")
    write(tmp_path / "other.end", "")
    until(lambda: lines(tmp_path / "status") == ["0"], why=lambda: terminal.printed)


@pytest.mark.parametrize("kind", COMMANDS)
@pytest.mark.parametrize("leads", [False, True])
def test_the_end_of_its_terminal_comes_once(
    kind: str, leads: bool, terminal: Terminal, tmp_path: Path
) -> None:
    """The kernel signals the leader of the session, which may be the command. A shell signals its
    jobs, and so does the kernel when the shell ends.
    """
    file = tmp_path / "file"
    terminal.type(f"{'exec ' if leads else ''}{typed(kind, 'record', file)}\n")
    has(terminal, file, "ready")
    terminal.hang_up()
    until(lambda: "SIGHUP" in lines(file))
    time.sleep(SETTLED)
    write(tmp_path / "file.end", "")
    got = [line for line in lines(file) if line != "SIGCONT"]
    assert got == ["ready", "SIGHUP"] or (not leads and got == ["ready", "SIGHUP", "SIGHUP"])
