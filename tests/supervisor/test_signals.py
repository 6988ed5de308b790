"""Which signals of the launcher's reach the worker as well: by its process, and by what Slurm
tracks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from srunddp.supervisor.signals import Launcher, signals_all
from tests.support.starting import until
from tests.support.worlds import world

SHARED = "cgroup:[4026531835]"
OWN = "cgroup:[4026532900]"
LAUNCHER = Launcher(pid=20, slurm=frozenset({20}), signals_all=False)
# What Gloo says where a peer has gone.
PEERS = """
import socket
path = f"{os.getcwd()}/peer"
if RANK == 1:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
        say("met")
        rest()
if RANK == 0:
    connection = socket.socket(socket.AF_UNIX)
    wait_for("ready.1")
    while connection.connect_ex(path): time.sleep(0.02)
    if not connection.recv(1):
        miss_peer()
rest()
"""
NAMED = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"slurmstepd")
inner = [sys.executable, "-c", "from srunddp.supervisor.signals import find_launcher; "
         "found = find_launcher('SLURM_PROCID', slurm=True); print(found.pid, *found.slurm)"]
wrapper = ["sh", "-c", 'unshare --user --map-root-user "$@"; exit $?', "sh", *inner]
print(__import__("os").getpid(), flush=True)
subprocess.run(wrapper, env={**__import__("os").environ, "SLURM_PROCID": "0"}, check=True)
"""


@pytest.mark.parametrize(
    ("groups", "namespace", "expected"),
    [
        (
            "6:freezer:/slurm/uid_0/job_7/step_0\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n",
            SHARED,
            False,
        ),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", SHARED, False),
        # Limited by control groups, and tracked by process trees.
        ("6:freezer:/\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n0::/\n", SHARED, True),
        ("0::/user.slice/session-1.scope\n", SHARED, True),
        ("0::/\n", OWN, None),
        ("6:freezer:/\n", OWN, None),
        ("", "", None),  # it cannot be read
    ],
)
def test_the_group_tells_whom_slurm_signals(
    groups: str, namespace: str, expected: bool | None, tmp_path: Path
) -> None:
    if namespace:
        (tmp_path / "cgroup").write_text(groups)
        (tmp_path / "namespace").symlink_to(namespace)
    assert signals_all(tmp_path / "cgroup", tmp_path / "namespace") is expected


@pytest.mark.parametrize(
    ("launcher", "sender", "from_kernel", "expected"),
    [
        (LAUNCHER, 20, False, False),
        (Launcher(20, frozenset({20}), True), 20, False, True),
        (Launcher(20, frozenset({20}), None), 20, False, None),
        # mpirun in a step, which signals the process group; and Slurm around it.
        (Launcher(30, frozenset({20}), False), 30, False, True),
        (Launcher(30, frozenset({20}), True), 20, False, True),
        (LAUNCHER, 99, False, False),  # somebody's kill
        (LAUNCHER, 0, True, True),  # a terminal
        (Launcher(0, frozenset({0}), None), 0, False, None),  # outside a container
        (Launcher(None), 0, False, False),
    ],
)
def test_the_sender_tells_who_has_it(
    launcher: Launcher, sender: int, from_kernel: bool, expected: bool | None
) -> None:
    code = 0x80 if from_kernel else 0
    received = signal.struct_siginfo((signal.SIGINT, code, 0, sender, 0, 0, 0))
    assert launcher.reached_worker(received) is expected


def test_the_launcher_is_found_from_a_user_namespace() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMED], capture_output=True, text=True, timeout=30, check=True
    )
    own, found = done.stdout.splitlines()
    assert found == f"{own} {own}", done.stderr


def test_slurm_outside_a_container_s_process_namespace_is_process_0() -> None:
    """As the kernel tells the sender of a signal that comes from there."""
    code = (
        "from srunddp.supervisor.signals import find_launcher; "
        "found = find_launcher('SLURM_PROCID', slurm=True); print(found.pid, *found.slurm)"
    )
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    environ = {**os.environ, "SLURM_PROCID": "0"}
    command = [*container, sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0 0\n"), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_launcher_that_is_hidden_is_the_parent() -> None:
    """Where /proc shows a user's own processes only, as on many sites (hidepid=2)."""
    code = (
        "import os; from srunddp.supervisor.signals import find_launcher; os.setgroups([]);"
        " os.setgid(65534); os.setuid(65534); found = find_launcher('SLURM_PROCID', slurm=True);"
        " print(found.pid, *found.slurm, os.getppid())"
    )
    hiding = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t proc -o hidepid=2 proc /proc && exec "$@"',
        "sh",
    ]
    done = subprocess.run(
        [*hiding, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    launcher, slurm, parent = done.stdout.split()
    assert launcher == slurm == parent


@pytest.mark.parametrize("skew", [0.05, 0.5])
def test_a_skew_of_sigterm_between_nodes_blames_nobody(skew: float, tmp_path: Path) -> None:
    """Whether it is less than the time that a failure waits for its cause, or more."""
    with world(tmp_path, PEERS, size=3, limits={"secondary_waits": 0.2}) as it:
        workers = it.workers()
        until((tmp_path / "met.1").exists)
        for rank in (1, 0, 2):
            time.sleep(skew if rank != 1 else 0.0)
            for pid in (it.ranks[rank].pid, workers[rank]):
                with contextlib.suppress(ProcessLookupError):
                    it.send(signal.SIGTERM, pid)
        ended = it.wait()
    assert ended.codes == [143] * 3, ended.text
    assert ended.verdicts == []
    said = (
        "srunddp: the launcher ended the run with SIGTERM, as for scancel or the time limit (exit"
        " code 143)\n"
    )
    assert ended.text == said


@pytest.mark.parametrize("first", [0, 1])
def test_a_skew_of_sigkill_between_nodes_ends_no_rank_early(first: int, tmp_path: Path) -> None:
    """As after two Ctrl-C at srun, or after KillWait: what handles the signal is left alone on the
    other nodes.
    """
    handlers = "".join(
        f"signal.signal(signal.{name}, lambda *_: say({said!r}))\n"
        for name, said in (("SIGINT", "asked"), ("SIGTERM", "ended"))
    )
    with world(tmp_path, f"{handlers}say('waits')\nrest()", size=2) as it:
        workers = it.workers()
        until(lambda: all((tmp_path / f"waits.{rank}").exists() for rank in range(2)))
        it.send(signal.SIGINT, *(rank.pid for rank in it.ranks), *workers)
        until(lambda: all((tmp_path / f"asked.{rank}").exists() for rank in range(2)))
        it.ranks[first].kill()
        it.ranks[first].wait()
        it.wait_until_handled(1 - first)
        assert not (tmp_path / f"ended.{1 - first}").exists()
        assert it.ranks[1 - first].poll() is None
        it.send(signal.SIGKILL, workers[1 - first])
        ended = it.wait()
    assert ended.codes[1 - first] in (128 + signal.SIGINT, 128 + signal.SIGKILL), ended.text
    assert ended.verdicts == []
