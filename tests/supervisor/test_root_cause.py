"""Of all failures one is the verdict; it is said once, in words and in failure.json."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.supervisor.failure import Failure, FailureKind, GpuFault, GpuFaultKind
from srunddp.supervisor.limits import Limits
from srunddp.supervisor.root_cause import (
    Ending,
    RootCause,
    find_root_cause,
    record,
    render,
    report,
    report_as_deputy,
)
from tests.support.facts import tells
from tests.support.starting import LONG

BOOM = Failure(
    1,
    "node02",
    "ValueError: boom",
    7,
    traceback="Traceback (most recent call last):\nValueError: boom\n",
)
ECHO = Failure(
    2, "node03", "RuntimeError: Broken pipe", 1, FailureKind.SECONDARY, "a victim's traceback"
)
ABORT = Failure(3, "node04", "killed by SIGABRT", 134, FailureKind.ABORTED)
NODES = {0: "node01", 1: "node02", 2: "node03", 3: "node04"}


def test_the_first_cause_to_arrive_counts_and_no_clock() -> None:
    early = replace(BOOM, rank=2, node="node03", exit_code=9, time="2020-01-01T00:00:00.000+00:00")
    found = find_root_cause([replace(BOOM, time="2026-01-01T00:00:00.000+00:00"), early], {})
    assert (found.ranks, found.exit_code) == ((1,), 7)


@pytest.mark.parametrize(
    "failures", [[ECHO, ABORT, BOOM], [ABORT, ECHO, BOOM], [BOOM, ECHO, ABORT]]
)
def test_a_cause_outweighs_an_abort_and_an_abort_an_echo(failures: list[Failure]) -> None:
    assert find_root_cause(failures, {}).ranks == (1,)
    assert find_root_cause([each for each in failures if each is not BOOM], {}).ranks == (3,)


def test_of_ranks_that_agreed_to_stop_the_lowest_speaks() -> None:
    stopped = [
        replace(BOOM, rank=rank, weight=FailureKind.STOPPED, traceback="") for rank in (2, 0, 1)
    ]
    asked = replace(BOOM, rank=3, weight=FailureKind.SIGNALLED)
    assert find_root_cause([asked, *stopped], {}).ranks == (0,)
    assert find_root_cause([asked, *stopped], {}).ending is Ending.STOPPED
    assert find_root_cause([*stopped, ECHO], {}).ranks == (2,)


@pytest.mark.parametrize(
    "weight", [FailureKind.ABORTED, FailureKind.NETWORK, FailureKind.SECONDARY]
)
def test_errors_after_the_launcher_s_signal_are_its_echo(weight: FailureKind) -> None:
    asked = replace(BOOM, exit_code=143, weight=FailureKind.SIGNALLED)
    peer = replace(ECHO, weight=weight)
    assert find_root_cause([asked, peer], {}).exit_code == 143
    assert find_root_cause([asked, peer], {}).ending is Ending.STOPPED
    # An echo may also be heard before what it is of; an abort of one's own that came first is none.
    assert find_root_cause([peer, asked], {}).exit_code == (
        143 if weight is FailureKind.SECONDARY else 1
    )
    assert find_root_cause([asked, peer, replace(BOOM, rank=3)], {}).exit_code == 7


def test_a_node_counts_as_failed_only_if_its_rank_did_not_fail_for_another() -> None:
    aborts = [ABORT, replace(ABORT, rank=2, node="node03")]
    refused = replace(ECHO, weight=FailureKind.NETWORK)
    assert find_root_cause([ECHO, BOOM], {}).suspect == "node02"
    assert find_root_cause([ECHO, ABORT], {}).suspect == "node04"
    assert find_root_cause([ECHO, refused], {}).suspect == "node03"
    assert find_root_cause([ECHO], {}).suspect == ""
    assert find_root_cause(aborts, {}).suspect == ""
    elsewhere = replace(refused, rank=3, node="node09")
    assert find_root_cause([refused, elsewhere], {}).suspect == ""
    assert find_root_cause([refused, replace(refused, rank=3)], {}).suspect == "node03"
    assert find_root_cause([ECHO], {0: "node01"}).suspect == "", "its data were over"


def test_a_root_cause_without_a_rank_says_why_and_who_ends_with_it() -> None:
    found = RootCause((), "", "no step for 5 s: all ranks wait in all_reduce", 124, notes=("x",))
    assert render(found, {0: "node01", 1: "node02"}).splitlines() == [
        "srunddp: no step for 5 s: all ranks wait in all_reduce (exit code 124)",
        "srunddp: x",
        "srunddp: ended with it: rank 0 on node01, rank 1 on node02",
    ]
    said = record(found, {0: "node01", 1: "node02"})
    assert (said["rank"], said["ranks"], said["node"]) == (None, (), "")
    assert [victim["rank"] for victim in said["victims"]] == [0, 1]


def test_a_victim_has_no_traceback_a_signal_blames_no_rank() -> None:
    found = find_root_cause([ECHO, BOOM], {})
    assert found.traceback == BOOM.traceback
    assert [(each.rank, each.traceback) for each in found.victims] == [(2, "")]
    asked = replace(
        BOOM,
        cause="the launcher ended the run",
        exit_code=143,
        weight=FailureKind.SIGNALLED,
        traceback="",
    )
    assert (
        render(RootCause.of(asked), NODES)
        == "srunddp: the launcher ended the run (exit code 143)\n"
    )


def test_a_rank_that_left_is_the_cause_where_others_miss_it() -> None:
    left = {0: "node01"}
    assert find_root_cause([BOOM], left).ranks == (1,)
    assert find_root_cause([ABORT], left).ranks == (3,)
    found = find_root_cause([ECHO], left)
    assert (found.ranks, found.node, found.exit_code) == ((0,), "node01", 1)
    assert tells(found.cause, "exit code 0", "rank 2 on node03")


def test_the_verdict_is_said_in_this_form() -> None:
    assert render(RootCause.of(BOOM), NODES) == (
        "srunddp: rank 1 on node02 failed: ValueError: boom (exit code 7)\n"
        "Traceback (most recent call last):\nValueError: boom\n"
        "srunddp: ended with it: rank 0 on node01, rank 2 on node03, rank 3 on node04\n"
    )
    said = render(RootCause.of(BOOM), {rank: f"node{rank // 8:04d}" for rank in range(4096)})
    assert said.splitlines()[-1] == "srunddp: ended with it: 4095 ranks on 512 nodes"


def test_commands_for_a_terminal_in_a_cause_are_shown_and_not_obeyed() -> None:
    """A script may put a file's name or an answer of the network into its exception."""
    bad = replace(BOOM, cause="OSError: \x1b]0;title\x07\r\x1b[31m", traceback="")
    assert render(RootCause.of(bad), {}) == (
        "srunddp: rank 1 on node02 failed: OSError: \\x1b]0;title\\x07\\r\\x1b[31m (exit code 7)\n"
    )


@pytest.mark.parametrize(
    ("nodes", "last_words"),
    [(16, "rank 14 on node14, rank 15 on node15, rank 16 on node16"), (17, "17 ranks on 17 nodes")],
)
def test_sixteen_nodes_are_named_and_more_are_counted(nodes: int, last_words: str) -> None:
    others = {rank: f"node{rank:02d}" for rank in range(1, nodes + 1)}
    said = render(RootCause.of(replace(BOOM, rank=0, node="node00")), others)
    assert said.splitlines()[-1].endswith(last_words)


def test_of_many_deputies_that_announce_at_once_one_is_heard(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = Limits(deputy_files_written_within=LONG)  # with a slow disk more than one is heard
    found = [RootCause.of(replace(BOOM, rank=rank)) for rank in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: report_as_deputy(each, tmp_path, limits), found))
    assert capfd.readouterr().err.count(" failed: ") == 1
    assert json.loads((tmp_path / "failure.json").read_text())["exit_code"] == 7


def test_without_a_folder_it_is_said_and_never_twice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report_as_deputy(RootCause.of(BOOM), tmp_path / "nowhere")
    assert "rank 1 on node02 failed" in capfd.readouterr().err
    report(RootCause.of(replace(BOOM, shown=True)), NODES)
    assert capfd.readouterr().err == ""


def gpu_fault(node: str, kind: GpuFaultKind) -> GpuFault:
    return GpuFault(3, "GPU-1a2b", "Xid 79, fallen off the bus", kind.value, 79, node)


def test_a_gpu_s_fault_is_in_the_summary_and_in_the_file() -> None:
    found = RootCause.of(BOOM).with_gpu_faults([gpu_fault("node02", GpuFaultKind.HARDWARE)])
    line = "srunddp: GPU 3 (GPU-1a2b) of node02: Xid 79, fallen off the bus\n"
    text = render(found, NODES)
    assert line in text
    assert text.startswith("srunddp: rank 1 on node02 failed: ValueError: boom (exit code 7)\n")
    assert record(found, NODES)["gpu_faults"] == [
        {
            "index": 3,
            "uuid": "GPU-1a2b",
            "what": "Xid 79, fallen off the bus",
            "kind": "hardware",
            "xid": 79,
            "node": "node02",
        }
    ]


def test_a_gpu_of_another_node_is_the_cause_of_what_only_follows() -> None:
    """Such as a limit of time of a collective."""
    fault = gpu_fault("node04", GpuFaultKind.HARDWARE)
    found = find_root_cause([ECHO], {}).with_gpu_faults([fault])
    assert (found.ranks, found.node, found.exit_code) == ((), "node04", ECHO.exit_code)
    assert found.cause == f"{fault}; then rank 2 on node03 failed: {ECHO.cause}"
    assert found.suspect == "node04"
    # An error of the script's own stays the cause.
    sure = find_root_cause([BOOM], {}).with_gpu_faults([fault])
    assert (sure.ranks, sure.cause) == ((1,), BOOM.cause)
    # The other node is left for its GPU, but the failure was not there.
    assert (sure.suspect, sure.faulty_nodes) == (BOOM.node, ("node04",))


def test_the_program_s_own_fault_speaks_against_no_node() -> None:
    assert RootCause.of(BOOM).suspect == "node02"
    found = RootCause.of(BOOM).with_gpu_faults([gpu_fault("node02", GpuFaultKind.PROGRAM)])
    assert found.suspect == ""
    assert "most likely the program's own fault, not the GPU's" in render(found, NODES)
