from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import srunddp as package
from tests.support.facts import tells
from tests.support.munged import munged
from tests.support.starting import (
    NODE,
    SRUNDDP,
    bare,
    ended,
    one_message,
    slurm,
    srunddp,
    started,
    until,
    workers_of,
    write,
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return write(tmp_path / "train.py", "import os; print('rank', os.environ['RANK'], 'ran')")


# Wrong usage and wrong configuration.


NO_SCRIPT = "; expected a script to run -> "
WRONG: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "no module's name": (("-m", "__main__"), {}, f"no module '__main__'{NO_SCRIPT}"),
    "no part of a module": (
        ("--quiet", "-m", "json.nope"),
        {},
        "No module named json.nope; expected a module to run",
    ),
    "no main module": (
        ("--quiet", "-m", "concurrent"),
        {},
        "No module named concurrent.__main__; 'concurrent' is a",
    ),
    "a placement that hides rank 0": (
        ("train.py",),
        slurm(1, SLURM_LOCALID="0", SLURM_HOSTFILE="hosts"),
        "-m arbitrary: SLURM_* alone does not tell where rank 0 is; expected ",
    ),
    "launchers that disagree": (
        ("train.py",),
        slurm(0, RANK="1"),
        "RANK=1, but SLURM_PROCID=0; expected ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_message_with_a_hint(script: Path, name: str) -> None:
    words, variables, message = WRONG[name]
    text = one_message(srunddp(*words, folder=script.parent, **variables))
    assert text.startswith(message.format(folder=script.parent))


def test_a_deleted_working_folder_is_said(tmp_path: Path) -> None:
    command = f"mkdir gone; cd gone; rmdir ../gone; {' '.join(SRUNDDP)} /no/such.py"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=bare(), capture_output=True, text=True
    )
    assert tells(one_message(done), "working folder", "deleted", "; expected ")


def test_a_wrong_ifaces_conf_is_named_with_line_and_column(script: Path) -> None:
    conf = write(script.parent / "ifaces.conf", "- nodes: '*'\n  interfaces: ib0\n")
    for done in (
        srunddp("--ifaces", conf, "train.py", folder=script.parent),
        srunddp("train.py", folder=script.parent, SRUNDDP_IFACES=str(conf)),
    ):
        text = one_message(done)
        assert tells(text, f"{conf}:2:3", "'interfaces'", "; expected ", "-> ", "interface")
        for key in ("nodes", "interface", "network", "address", "env", "ports"):
            assert tells(text, "expected", key, "->")


def test_an_interface_that_is_not_there_stops_before_the_script(script: Path) -> None:
    conf = write(script.parent / "ifaces.conf", "- nodes: '*'\n  interface: nosuch0\n")
    options = ("--timeout", "0.5", "--ifaces", conf)
    text = one_message(srunddp(*options, "train.py", folder=script.parent, **slurm(0)))
    assert tells(text, f"{conf}:1:3", "nosuch0", NODE)
    assert "lo (127.0.0.1" in text


# Who says what is wrong with all.


def test_rank_zero_alone_prints_what_is_wrong_with_the_whole_job(script: Path) -> None:
    """Such as ranks that count differently: both know it, one says it."""
    first, second = ranks(
        (("train.py",), slurm(0, 2)), (("train.py",), slurm(1, 3)), folder=script.parent
    )
    assert one_message(first, 69).startswith(
        f"rank 1 on {NODE} counts 3 ranks, rank 0 counts 2; expected one world"
    )
    assert (second.returncode, second.stdout, second.stderr) == (69, "", "")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_one_rank_of_a_node_prints_what_is_wrong_with_the_node(
    tmp_path: Path, local_rank: int
) -> None:
    """Such as a script that only some nodes see."""
    variables = slurm(
        2 + local_rank, 4, SLURM_LOCALID=str(local_rank), SLURM_GTIDS="2,3", SLURM_NODEID="1"
    )
    done = srunddp("--timeout", "0.5", "no-such.py", folder=tmp_path, **variables)
    if local_rank == 0:
        assert one_message(done).startswith("no file no-such.py")
    else:
        assert (done.returncode, done.stdout, done.stderr) == (78, "", "")


# What it says when nothing is wrong.


def test_the_version_is_the_packages() -> None:
    done = srunddp("--version", folder=Path.cwd())
    assert (done.returncode, done.stdout) == (0, f"srunddp, version {package.__version__}\n")


@pytest.mark.parametrize("arguments", [("run", "--help"), ("run", "-h")])
def test_every_way_to_ask_for_help_names_the_options(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = srunddp(*arguments, folder=tmp_path)
    assert done.returncode == 0
    options = (
        "--backend,--ifaces FILE,--timeout DURATION,--channel,--port,--explain,--quiet,--verbose,-m"
    )
    assert all(option in done.stdout for option in [*options.split(","), "SCRIPT [ARGUMENTS]..."])


def test_one_line_says_where_everything_is(script: Path) -> None:
    done = srunddp("--backend", "gloo", "train.py", folder=script.parent)
    assert (done.returncode, done.stdout) == (0, "rank 0 ran\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "srunddp: 1 rank on 1 node, launcher none, channel none, master 127.0.0.1 port "
    )
    assert line.endswith(", interface lo (loopback, as a single process), backend gloo")


@pytest.mark.parametrize(
    ("options", "said"),
    [(("run", "--quiet"), ""), (("--quiet", "--verbose"), "[RANK 0] WORLD_SIZE=1\n")],
)
def test_what_it_says_is_chosen(script: Path, options: tuple[str, ...], said: str) -> None:
    done = srunddp(*options, "train.py", folder=script.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 ran\n", said)


@pytest.mark.parametrize(
    ("options", "value", "said"),
    [(("--restarts=1",), "1", True), (("--restarts=1",), "0", False), ((), "1", False)],
)
def test_restarts_say_at_the_start_that_they_do_not_help_for_memory(
    script: Path, options: tuple[str, ...], value: str, said: bool
) -> None:
    """Where the kernel kills a whole step, srunddp with it."""
    done = srunddp(*options, script, folder=script.parent, SLURM_OOM_KILL_STEP=value)
    assert done.returncode == 0, done.stderr
    assert ("memory runs out, as OOMKillStep is on: srun --oom-kill-step=0" in done.stderr) is said


def test_a_full_disk_below_standard_error_ends_nothing(script: Path) -> None:
    command = [*SRUNDDP, "--verbose", "train.py"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=script.parent, env=bare(), stdout=subprocess.PIPE, stderr=full, text=True
        )
    assert (done.returncode, done.stdout) == (0, "rank 0 ran\n")


def test_a_job_shell_is_told_of_srun(script: Path) -> None:
    done = srunddp(
        "--quiet",
        "train.py",
        folder=script.parent,
        SLURM_JOB_ID="7",
        SLURM_PROCID="0",
        SLURM_NTASKS="6",
    )
    assert (done.returncode, done.stdout) == (0, "rank 0 ran\n")
    assert tells(done.stderr, "Slurm", "not a step", "world size 1")


# Two ranks.


def ranks(
    *starts: tuple[tuple[object, ...], dict[str, str]], folder: Path
) -> list[CompletedProcess[str]]:
    """Each rank's arguments and variables."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda start: srunddp(*start[0], folder=folder, **start[1]), starts))


def both(*arguments: object, folder: Path, **changes: str) -> list[CompletedProcess[str]]:
    return ranks(*((arguments, slurm(rank, **changes)) for rank in (0, 1)), folder=folder)


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        ((), {"WORLD_SIZE": "9"}, "WORLD_SIZE=9"),
        ((), {"SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE"),
        (
            ("--channel", "pmi"),
            {},
            "--channel pmi is not available under Slurm; expected one of slurm, env -> ",
        ),
    ],
)
def test_what_all_have_wrong_is_said_once(
    script: Path, words: tuple[str, ...], changes: dict[str, str], said: str
) -> None:
    first, second = both(*words, "--quiet", "train.py", folder=script.parent, **changes)
    assert said in one_message(first)
    assert (second.returncode, second.stderr) == (78, "")


def test_two_ranks_meet_and_rank_zero_speaks_for_both(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "import os, json; print(json.dumps(dict(os.environ)))")
    first, second = both(
        "--verbose", "train.py", folder=tmp_path, MASTER_ADDR="n1", MASTER_PORT="29500"
    )
    note, placement, hello = first.stderr.splitlines()
    assert note.startswith("srunddp: MASTER_ADDR=n1 and MASTER_PORT=29500 ignored")
    assert placement.startswith(
        "srunddp: 2 ranks on 1 node, launcher Slurm, channel slurm, master 127.0.0.1 port "
    )
    assert hello == "[RANK 0] WORLD_SIZE=2"
    assert second.stderr == "[RANK 1] WORLD_SIZE=2\n"
    one = json.loads(first.stdout)
    two = json.loads(second.stdout)
    assert (one["RANK"], two["RANK"]) == ("0", "1")
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
    ):
        assert one[name] == two[name]
    assert f"port {one['MASTER_PORT']}, " in placement


def test_ctrl_c_ends_ranks_that_wait_for_each_other(script: Path) -> None:
    with started("--quiet", "train.py", folder=script.parent, **slurm(0)) as process:
        until(lambda: workers_of(process.pid))
        # The terminal sends it to both; only the worker acts on it.
        os.kill(workers_of(process.pid)[0], signal.SIGINT)
        assert ended(process) == (
            130,
            "",
            f"srunddp: error: rank 0 on {NODE} failed: killed by SIGINT\n",
        )


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, f"1 of 2 ranks did not come: rank 1 on {NODE}; expected "),
        (1, f"rank 1 on {NODE} (127.0.0.1) did not reach rank 0 at 127.0.0.1:"),
    ],
)
def test_a_rank_that_does_not_come_is_named_and_no_script_starts(
    script: Path, rank: int, said: str
) -> None:
    done = srunddp(
        "--timeout", "0.5", "train.py", folder=script.parent, **slurm(rank, SLURM_LOCALID="0")
    )
    assert one_message(done, 69).startswith(said)


# Failures before all have met.


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_before_the_rendezvous_ends_all_at_once(script: Path, failing: int) -> None:
    """Such as a script that one of the nodes does not see; the other would wait for 300 s."""
    names = ["train.py", "train.py"]
    names[failing] = "no-such.py"
    starts = (((name,), slurm(rank, SLURM_LOCALID="0")) for rank, name in enumerate(names))
    first, second = ranks(*starts, folder=script.parent)
    if failing:
        prefix = f"rank 1 on {NODE} failed: "
    else:
        prefix = ""
    text = one_message(first)
    assert text.startswith(prefix)
    assert tells(text, "no-such.py", script.parent, "; expected ", " -> ")
    assert (second.returncode, second.stdout, second.stderr) == (78, "", "")


def test_a_wrong_interface_of_one_rank_is_said_by_rank_zero(script: Path) -> None:
    conf = write(script.parent / "ifaces.conf", "- {nodes: '*', interface: [lo, nope0]}\n")
    first, second = both("--ifaces", conf, "train.py", folder=script.parent)
    assert tells(one_message(first), "rank 1", NODE, f"{conf}:1:3", "nope0", NODE)
    assert (second.returncode, second.stdout, second.stderr) == (78, "", "")


def test_a_rank_without_munge_is_refused_where_others_have_it(script: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, munged(Path(folder) / "one") as where:
        done = both("--quiet", "train.py", folder=script.parent, SRUNDDP_MUNGE_SOCKET=where)
        seen = [(rank.returncode, rank.stdout, rank.stderr) for rank in done]
        assert seen == [(0, "rank 0 ran\n", ""), (0, "rank 1 ran\n", "")]
        words = ("--quiet", "train.py")
        # Not that of a munged which this machine may run, as login nodes do.
        nowhere = str(Path(folder) / "no-socket")
        with started(
            *words, folder=script.parent, **slurm(0, SRUNDDP_MUNGE_SOCKET=where)
        ) as rank_zero:
            refused = srunddp(
                *words, folder=script.parent, **slurm(1, SRUNDDP_MUNGE_SOCKET=nowhere)
            )
            # It would wait for another rank 1.
            os.kill(workers_of(rank_zero.pid)[0], signal.SIGINT)
            assert "refused rank 1 on " in ended(rank_zero)[2]
        text = one_message(refused, 69)
        assert tells(text, "rank 1", NODE, "rank 0", "refused", "none", "munge", "; expected ")
