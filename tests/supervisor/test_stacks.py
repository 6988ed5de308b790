"""Where each rank is, read from what faulthandler wrote; the rank that the others wait for is found
by it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from srunddp.supervisor.stacks import StackDump
from srunddp.util.python_stack import (
    dump_of_printed,
    find_blocking_rank,
    format_stack,
    groups,
    is_waiting,
    main_stack,
    top_frame,
)
from tests.support.recorded_writes import ALL_REDUCE, BACKWARD, LOAD_BATCH
from tests.support.starting import until


@pytest.mark.parametrize(
    "text", ["", "Fatal Python error: Aborted", "Current thread", "Current thread 0x01:\nno"]
)
def test_where_there_is_no_stack_that_is_said(text: str) -> None:
    assert main_stack(text) == ()
    assert top_frame(main_stack(text)) == "no stack"
    assert format_stack(main_stack(text)) == ""


def test_a_place_is_the_innermost_frame_that_is_no_wrapper() -> None:
    assert top_frame(main_stack(LOAD_BATCH)) == "load_batch (train.py:7)"
    wrapped = ALL_REDUCE.replace("line 3252 in all_reduce", "line 3252 in inner")
    assert top_frame(main_stack(wrapped)) == "train (train.py:10)"


def test_the_stack_is_that_of_the_thread_that_took_the_signal() -> None:
    """It is shown as Python shows one."""
    assert [frame["function"] for frame in main_stack(ALL_REDUCE)] == [
        "all_reduce",
        "wrapper",
        "train",
        "<module>",
    ]
    assert format_stack(main_stack(LOAD_BATCH)).splitlines() == [
        "Stack (most recent call last):",
        '  File "/data/train.py", line 18, in <module>',
        '  File "/data/train.py", line 9, in train',
        '  File "/data/train.py", line 7, in load_batch',
    ]


def test_ranks_in_one_frame_are_a_group_the_largest_first() -> None:
    texts = {0: LOAD_BATCH, 1: ALL_REDUCE, 2: ALL_REDUCE, 3: ""}
    assert groups(texts) == {
        "all_reduce (distributed_c10d.py:3252)": [1, 2],
        "load_batch (train.py:7)": [0],
        "no stack": [3],
    }


@pytest.mark.parametrize(
    ("text", "waiting"), [(ALL_REDUCE, True), (BACKWARD, True), (LOAD_BATCH, False), ("", False)]
)
def test_a_rank_in_a_collective_or_backward_pass_waits(text: str, waiting: bool) -> None:
    assert is_waiting(main_stack(text)) == waiting


@pytest.mark.parametrize(
    ("texts", "steps", "odd"),
    [
        ({0: ALL_REDUCE, 1: ALL_REDUCE, 2: LOAD_BATCH, 3: ALL_REDUCE}, {}, 2),
        ({0: BACKWARD, 1: LOAD_BATCH, 2: BACKWARD}, {}, 1),
        # All others wait: the one that gives no stack.
        ({0: ALL_REDUCE, 1: "", 2: ALL_REDUCE}, {}, 1),
        # Nothing is known of one, and another was seen elsewhere; even if it is a step ahead.
        ({0: "", 1: LOAD_BATCH, 2: ALL_REDUCE}, {0: 7, 1: 8, 2: 8}, 1),
        ({0: "", 1: LOAD_BATCH}, {}, 1),
        # All wait: the one that is a step behind.
        ({0: ALL_REDUCE, 1: ALL_REDUCE, 2: ALL_REDUCE}, {0: 8, 1: 8, 2: 7}, 2),
        # It left out a collective, so it is ahead, and waits in another one.
        ({0: ALL_REDUCE, 1: BACKWARD, 2: ALL_REDUCE}, {0: 7, 1: 8, 2: 7}, 1),
        # All wait in the same step: the one that is elsewhere.
        ({0: ALL_REDUCE, 1: ALL_REDUCE, 2: BACKWARD}, {0: 8, 1: 8, 2: 8}, 2),
        # Nobody waits.
        ({0: LOAD_BATCH, 1: LOAD_BATCH, 2: LOAD_BATCH}, {0: 8, 1: 7, 2: 8}, 1),
        # Among several that do not wait, the one that is behind; a step counts for more than a
        # place.
        ({0: LOAD_BATCH, 1: LOAD_BATCH, 2: ALL_REDUCE}, {0: 8, 1: 7, 2: 8}, 1),
        # Nothing tells them apart.
        ({0: LOAD_BATCH, 1: LOAD_BATCH}, {0: 8, 1: 8}, 0),
    ],
)
def test_the_odd_one_is_who_the_others_wait_for(
    texts: dict[int, str], steps: dict[int, int], odd: int
) -> None:
    assert find_blocking_rank(texts, steps) == odd


# The real thing.

ARMED = """
import os, signal, sys, time
from srunddp.supervisor.stacks import StackDump
dump = StackDump(int(sys.argv[1]))
dump.arm()
if sys.argv[2] in ("threads", "blocked"):
    import threading
    for _ in range(130):
        threading.Thread(target=time.sleep, args=[60], daemon=True).start()
print("ready", flush=True)
def deep():
    while True: time.sleep(60)
def load_batch(): deep()
if sys.argv[2] == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
if sys.argv[2] == "executed":
    os.execvp("sleep", ["sleep", "60"])
if sys.argv[2] == "hold":
    import ctypes
    ctypes.PyDLL(None).sleep(60)
if sys.argv[2] == "crash":
    import ctypes
    ctypes.string_at(0)
load_batch()
"""


def armed(dump: StackDump, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ARMED, str(dump.descriptor), how]
    process = subprocess.Popen(
        command, pass_fds=[dump.descriptor], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def in_call(process: subprocess.Popen[str]) -> bool:
    """Whether it sleeps in the kernel."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("how", ["wait", "hold", "threads"])
def test_a_stack_is_had_without_the_gil_and_beside_many_threads(how: str) -> None:
    dump = StackDump()
    with armed(dump, how) as process:
        until(lambda: in_call(process))
        stack = main_stack(dump.request(process.pid))
        process.kill()
    functions = [frame["function"] for frame in stack]
    assert functions == (["<module>"] if how == "hold" else ["deep", "load_batch", "<module>"])


DUMP = b"""\
Stack (most recent call first):
  File "/home/u/t\xc3\xa4st/sigp.py", line 8 in <module>
  File "/opt/srunddp/run/main_module.py", line 181 in run_file
  File "/opt/srunddp/run/script.py", line 108 in run
  File "/opt/click/core.py", line 1 in main
"""


def test_a_stack_is_whole_wherever_a_look_cuts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faulthandler writes a line in many pieces; a slow machine shows them one by one."""
    dump = StackDump()
    pieces: list[bytes] = []

    def sleep(_: float) -> None:
        if pieces:
            os.write(dump.descriptor, pieces.pop(0))

    monkeypatch.setattr(time, "sleep", sleep)
    with subprocess.Popen(["sleep", "60"]) as process:
        for cut in range(1, len(DUMP)):
            pieces[:] = [DUMP[:cut], DUMP[cut:]]
            whole = dump.request(process.pid)
            assert whole.splitlines() == [
                "Stack (most recent call first):",
                '  File "/home/u/täst/sigp.py", line 8 in <module>',
            ], DUMP[:cut]
        process.kill()


def test_what_a_crash_leaves_is_there_when_the_process_has_gone() -> None:
    dump = StackDump()
    with armed(dump, "crash") as process:
        assert process.wait(timeout=20) == -signal.SIGSEGV
    text = dump.read()
    assert text.startswith("Fatal Python error: Segmentation fault")
    assert "in string_at" in text
    assert dump.read() == "", "it is told once"


def test_another_program_in_the_worker_s_process_survives_the_question() -> None:
    dump = StackDump()
    with armed(dump, "executed") as process:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        assert dump.request(process.pid) == ""
        assert process.poll() is None
        process.kill()


def test_no_other_thread_answers_for_one_that_blocks_signals() -> None:
    dump = StackDump()
    with armed(dump, "blocked") as process:
        until(lambda: in_call(process))
        assert dump.request(process.pid) == ""
        process.kill()


def test_a_process_that_does_not_answer_has_no_stack() -> None:
    with subprocess.Popen(["env", "--ignore-signal", "sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        assert StackDump().request(process.pid) == ""
        process.kill()


def test_a_worker_that_is_still_starting_survives_the_question() -> None:
    """It has inherited that the signal is ignored."""
    dump = StackDump()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert dump.request(process.pid) == ""
        assert process.poll() is None
        process.kill()


def test_a_printed_stack_is_read_again() -> None:
    for text in (ALL_REDUCE, BACKWARD, LOAD_BATCH):
        printed = format_stack(main_stack(text))
        again = main_stack(dump_of_printed(printed.splitlines()))
        assert top_frame(again) == top_frame(main_stack(text))
        assert format_stack(again) == printed
    assert main_stack(dump_of_printed(["no", "stack"])) == ()
