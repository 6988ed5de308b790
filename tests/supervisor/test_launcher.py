"""The launcher is found among the ancestors, and the sender of a signal is told from others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from srunddp.supervisor.launcher import Launcher, is_tracked_by_cgroup

NAMED = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"slurmstepd")
inner = [sys.executable, "-c", "from srunddp.supervisor.launcher import find_launcher; "
         "found = find_launcher('SLURM_PROCID', slurm=True); print(found.pid, *found.slurm)"]
wrapper = ["sh", "-c", 'unshare --user --map-root-user "$@"; exit $?', "sh", *inner]
print(__import__("os").getpid(), flush=True)
subprocess.run(wrapper, env={**__import__("os").environ, "SLURM_PROCID": "0"}, check=True)
"""


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (
            "6:freezer:/slurm/uid_0/job_7/step_0\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n",
            True,
        ),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", True),
        # Limited by control groups, and tracked by process trees.
        ("6:freezer:/\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n0::/\n", False),
        ("0::/user.slice/session-1.scope\n", False),
        ("0::/\n", False),  # hidden by a container
        (None, False),  # it cannot be read
    ],
)
def test_the_group_tells_how_slurm_tracks_processes(
    groups: str | None, expected: bool, tmp_path: Path
) -> None:
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups)
    assert is_tracked_by_cgroup(tmp_path / "cgroup") is expected


@pytest.mark.parametrize(
    ("launcher", "sender", "expected"),
    [
        (Launcher(20, frozenset({20}), tracks_by_cgroup=True), 20, True),
        (Launcher(20, frozenset({20})), 20, False),
        # mpirun in a step, which signals the process group; and Slurm around it.
        (Launcher(30, frozenset({20}), tracks_by_cgroup=True), 30, False),
        (Launcher(30, frozenset({20}), tracks_by_cgroup=True), 20, True),
        (Launcher(20, frozenset({20}), tracks_by_cgroup=True), 99, False),  # somebody's kill
    ],
)
def test_slurm_spares_the_worker_only_where_it_tracks_by_control_groups(
    launcher: Launcher, sender: int, expected: bool
) -> None:
    received = signal.struct_siginfo((signal.SIGINT, 0, 0, sender, 0, 0, 0))
    assert launcher.spares_the_worker(received) is expected


# The test process stands for a supervisor below a launcher: `sh` is a worker, `sleep` its child.
@pytest.mark.parametrize("below", [False, True])
def test_a_worker_and_what_it_has_started_are_the_rank_s(below: bool) -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout
        child = int(worker.stdout.readline())
        sender = child if below else worker.pid
        launcher = Launcher(os.getppid())
        try:
            assert launcher.is_of_rank(sender, ())
            assert not launcher.is_of_rank(sender, {worker.pid})  # a helper, and no worker
        finally:
            os.kill(child, signal.SIGKILL)


def test_another_task_of_the_launcher_is_a_rank_and_a_wrapper_s_helper_is_none() -> None:
    """A task and a helper look alike, but for whose child they are."""
    code = (
        "import os, subprocess, sys; from srunddp.supervisor.launcher import Launcher;"
        " other = int(sys.stdin.readline()); grandparent = int(sys.stdin.readline());"
        " print(Launcher(os.getppid()).is_of_rank(other, ()),"
        " Launcher(grandparent).is_of_rank(other, ()), Launcher(None).is_of_rank(other, ()))"
    )
    with subprocess.Popen(["sleep", "60"]) as other:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=f"{other.pid}\n{os.getppid()}\n",
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        other.kill()
    assert done.stdout == "True False False\n", done.stderr


def test_neither_the_launcher_nor_a_wrapper_nor_the_kernel_is_a_rank() -> None:
    launcher = Launcher(1)
    for sender in (0, 1, os.getpid(), os.getppid(), 1 << 30):
        assert not launcher.is_of_rank(sender, ())


def test_the_launcher_is_found_from_a_user_namespace() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NAMED], capture_output=True, text=True, timeout=30, check=True
    )
    own, found = done.stdout.splitlines()
    assert found == f"{own} {own}", done.stderr


def test_slurm_outside_a_container_s_process_namespace_is_process_0() -> None:
    """As the kernel tells the sender of a signal that comes from there."""
    code = (
        "from srunddp.supervisor.launcher import find_launcher; "
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
        "import os; from srunddp.supervisor.launcher import find_launcher; os.setgroups([]);"
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
