"""CPU time and memory of a rank's processes, as the kernel counts them; what ends is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from srunddp.monitor.sampler.process_tree import MonotonicCounter, Process, ProcessTree, Tasks
from srunddp.util.kernel_file import children_of
from tests.support.sampled import RANK, supervised
from tests.support.starting import bare, read_line, until

pytestmark = pytest.mark.slow

BURN = "import time\nwhile time.process_time() < {seconds}: pass\n"
MIB = 1 << 20
TIMES = 4  # how many figures of os.times() are added up, each of them up to one tick too low


@contextmanager
def started(command: list[str], variables: dict[str, str], **options: Any) -> Iterator[Any]:
    """A process in a group of its own; all of the group is killed at the end."""
    with subprocess.Popen(
        command, env=bare(variables), start_new_session=True, **options
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def running(program: str) -> AbstractContextManager[Any]:
    """A Python program with pipes."""
    pipe = subprocess.PIPE
    return started(
        [sys.executable, "-c", program], {}, stdin=pipe, stdout=pipe, text=True, bufsize=1
    )


def tree_of(process: subprocess.Popen[str]) -> ProcessTree:
    """As it is when the process has written a line."""
    read_line(process)
    tree = ProcessTree(0, process.pid)
    tree.look(thorough=False)
    return tree


def test_a_child_that_ends_between_two_readings_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parent has been read without it already, and it is gone when its turn comes."""
    child = BURN.format(seconds=0.3) + "print('x', flush=True); input()"
    program = (
        "import subprocess, sys, time\nsubprocess.run([sys.executable, '-c',"
        f" {child!r}])\ntime.sleep(60)"
    )
    with running(program) as process:
        tree = tree_of(process)
        look = Process.look
        before = tree.cpu.value

        def ended_meanwhile(self: Process, *, thorough: bool) -> bool:
            alive = look(self, thorough=thorough)
            if self.pid == process.pid and process.stdin and not process.stdin.closed:
                process.stdin.close()
                until(lambda: not children_of(process.pid))
            return alive

        monkeypatch.setattr(Process, "look", ended_meanwhile)
        for _ in range(2):
            tree.look(thorough=False)
            assert before <= tree.cpu.value < 1.2 * before


def test_nothing_is_lost_when_children_end() -> None:
    """Of two generations, some of which it never saw."""
    child = BURN.format(seconds=0.15)
    parent = (
        "import os, subprocess, sys\nfor line in sys.stdin:\n    subprocess.run([sys.executable,"
        f" '-c', {child!r}])\n"
    )
    parent += "    print(sum(os.times()[:4]), flush=True)\n"
    with running(parent) as process:
        tree = ProcessTree(0, process.pid)
        seen = [0]
        for seconds in range(1, 5):
            process.stdin.write("\n")
            while seconds % 2 and tree.processes < 2:
                tree.look(thorough=False)
            used = float(read_line(process))
            tree.look(thorough=False)
            seen.append(tree.cpu.value)
            assert abs(tree.cpu.value / 1e9 - used) < 0.05 * used + 0.02
        assert seen == sorted(seen)


def test_what_a_parent_does_not_take_over_is_kept() -> None:
    """A child that is not waited for: its parent ignores its end."""
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "if not os.fork():\n"
        "    while time.process_time() < 0.3: pass\n"
        "    print('x', flush=True); input(); os._exit(0)\n"
        "time.sleep(60)\n"
    )
    with running(program) as process:
        tree = tree_of(process)
        before = tree.cpu.value
        assert tree.processes == 2

        def processes() -> int:
            tree.look(thorough=False)
            return tree.processes

        process.stdin.write("\n")
        until(lambda: processes() == 1)
        tree.look(thorough=False)
        assert before > 0.3e9
        assert before <= tree.cpu.value < 1.1 * before


def test_a_fall_by_the_kernel_s_rounding_is_not_kept() -> None:
    sum_of = MonotonicCounter(20)
    found = []
    for total in (100, 90, 100, 85, 100, 50, 60):
        sum_of.update(total)
        found.append(sum_of.value)
    assert found == [100, 100, 100, 100, 100, 100, 110]


def test_children_of_other_threads_are_found_by_a_thorough_look() -> None:
    program = "import subprocess, threading, time\n"
    program += (
        "def work():\n    subprocess.Popen(['sleep', '60']); print('x', flush=True);"
        " time.sleep(60)\n"
    )
    program += "threading.Thread(target=work).start()\n"
    with running(program) as process:
        tree = tree_of(process)
        alone = tree.processes
        tree.look(thorough=True)
        assert (alone, tree.processes) == (1, 2)


def test_memory_is_the_resident_set_of_all_processes_together() -> None:
    program = (
        "import os, time\nx = bytearray(b'x' * (100 << 20))\nos.fork()\nx[::4096] = x[1::4096]\n"
    )
    program += "print('x', flush=True); time.sleep(60)"
    with running(program) as process:
        read_line(process)
        tree = tree_of(process)
        assert 200 * MIB < tree.resident < 240 * MIB


def test_storage_io_is_counted_once() -> None:
    """Also of a child that has ended, whose parent has it by then."""
    with TemporaryDirectory(dir="/var/tmp") as folder:  # which is no memory, as /tmp may be
        child = (
            f"import os\nwith open({folder + '/x'!r}, 'wb') as f: f.write(bytes(3 << 20));"
            " f.flush(); os.fsync(f)\n"
        )
        program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n"
        with running(program + "print('x', flush=True); input()") as process:
            tree = tree_of(process)
            assert 3 * MIB <= tree.bytes_written.value < 4 * MIB


def test_the_tasks_of_a_node_are_found_below_their_launcher() -> None:
    """One begins later, one is a wrapper whose child has the rank as well, and one is no task."""
    sleep = ["sh", "-c", "sleep 60; true"]
    with ExitStack() as stack:
        task = stack.enter_context(started(sleep, {RANK: "0"}))
        _ = stack.enter_context(started(sleep, {}))
        until(lambda: children_of(task.pid))
        (supervisor,) = children_of(task.pid)
        found = Tasks(0, supervisor, os.getpid(), RANK)
        found.look(thorough=True)
        assert [(tree.rank, tree.root) for tree in found.trees] == [(0, task.pid)]
        with started(sleep, {RANK: "3", "CUDA_VISIBLE_DEVICES": "1"}) as later:
            # The kernel shows its environment a moment after exec has closed Popen's pipe.
            until(lambda: f"{RANK}=3".encode() in Path(f"/proc/{later.pid}/environ").read_bytes())
            assert found.look(thorough=False)
            assert [(tree.rank, tree.root) for tree in found.trees[1:]] == [(3, later.pid)]
            assert "1" in found.visible
            until(
                lambda: (
                    [found.look(thorough=False), *(tree.processes for tree in found.trees)]
                    == [False, 2, 2]
                )
            )
            rows = [line.split(",")[:2] for line in found.rows("7.000").splitlines()]
            assert rows == [["7.000", "0"], ["7.000", "3"]]
        until(lambda: found.look(thorough=False) or not found.trees[1].processes)
        assert [line.split(",")[1] for line in found.rows("8.000").splitlines()] == ["0"]


@pytest.mark.parametrize("moved", [0, -4])
def test_tasks_of_a_spare_node_have_the_ranks_that_came(
    moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the launcher's variable they still have their first numbers."""
    monkeypatch.setenv(RANK, "4")
    sleep = ["sleep", "60"]
    with started(sleep, {RANK: "4"}) as own, started(sleep, {RANK: "5"}) as other:
        found = Tasks(4 + moved, own.pid, os.getpid(), RANK)
        until(lambda: found.look(thorough=True) or len(found.trees) > 1)
        assert [(tree.rank, tree.root) for tree in found.trees] == [
            (4 + moved, own.pid),
            (5 + moved, other.pid),
        ]


def test_the_cpus_of_a_node_are_those_of_all_masks_together() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        return
    one, other = sorted(os.sched_getaffinity(0))[:2]
    pinned = [
        (["taskset", "-c", str(cpu), "sleep", "60"], {RANK: str(cpu)}) for cpu in (one, other)
    ]
    with started(*pinned[0]) as task:
        with started(*pinned[1]) as second:
            found = Tasks(one, task.pid, os.getpid(), RANK)
            until(
                lambda: [len(os.sched_getaffinity(each.pid)) for each in (task, second)] == [1, 1]
            )
            found.look(thorough=True)
            assert found.cpus() == 2
        assert found.cpus() == 1


def test_a_busy_job_s_files_say_what_the_kernel_says(tmp_path: Path) -> None:
    with supervised(tmp_path, seconds=0.05) as job:
        run = f"__import__('subprocess').run([sys.executable, '-c', {BURN.format(seconds=0.6)!r}])"
        # The sampler is one of the job's processes.
        own = "__import__('time').clock_gettime((~sampler.pid << 3) | 2)"
        least = float(job.do(f"{run} and sum(os.times()[:4]) + {own}"))
        assert job.finish() == ""
        # The sampler has ended, and the kernel counts it with the other children. It has taken
        # samples until then, and on a busy machine that takes a part of a second.
        most = float(job.do("sum(os.times()[:4])")) + TIMES / os.sysconf("SC_CLK_TCK")
        last = job.rows("tasks")[-1]
        node = job.rows("node")[-1]
    assert 0.95 * least < float(last["cpu_s"]) < 1.05 * most
    assert (node["source"], node["interface"], last["rank"]) == ("processes", "eth0", "0")
    assert float(node["cpu_s"]) == float(last["cpu_s"])
    assert int(node["memory_bytes"]) == int(last["rss_bytes"]) > 5 * MIB
    assert float(node["iowait_s"]) >= 0
