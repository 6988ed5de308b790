from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

import pytest

from srunddp.bootstrap.environment import detect as environment
from srunddp.bootstrap.environment import mpi
from srunddp.bootstrap.environment.types import Environment
from srunddp.errors import ConfigError
from tests.support.launchers import (
    JOB,
    PID,
    batch_body,
    daemon_step,
    hydra,
    interactive_step,
    nested_in_pty_shell,
    open_mpi,
    pty_shell,
    step,
)

EXPLICIT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def mpi4py(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether mpi4py is installed; here it is unless a test says otherwise."""

    def installed(there: bool) -> None:
        monkeypatch.setattr(mpi, "is_installed", lambda: there)

    installed(True)
    return installed


def detect(variables: Mapping[str, str], channel: str | None = None, pid: int = PID) -> Environment:
    return environment.detect(variables, channel=channel, pid=pid)


def refused(variables: dict[str, str], channel: str | None = None) -> str:
    """The message with which these variables are refused."""
    with pytest.raises(ConfigError) as caught:
        detect(variables, channel)
    text = str(caught.value)
    assert "\n" not in text
    assert "; expected " in text
    assert " -> " in text
    return text


def who(found: Environment) -> tuple[str, int, int, int]:
    return found.launcher, found.rank, found.local_rank, found.world_size


PMIX = {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.1207.0", "PMIX_HOSTNAME": "node03"}
PMI2 = {"PMI_FD": "9", "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_JOBID": "1207.0"}
OPEN_MPI_4 = {"OMPI_MCA_orte_hnp_uri": "1234.0;tcp://10.0.0.1:5000", "OMPI_MCA_ess_base_vpid": "1"}
INTEL = {"I_MPI_HYDRA_UUID": "ab12", "I_MPI_HYDRA_BOOTSTRAP": "ssh"}
PALS = {
    "PALS_APID": "77",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
}
PALS |= {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_CONTROL_PORT": "4000",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
}
MVAPICH2 |= {"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "2"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "6",
    "JSM_NAMESPACE_LOCAL_RANK": "2",
    "LSB_JOBID": "9",
}
FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "PMI_FD": "9"}

LAUNCHERS = {
    "srun": (step(3), ("Slurm", 3, 1, 4), 2, ("slurm",)),
    "srun-pmi2": (step(3) | PMI2, ("Slurm", 3, 1, 4), 2, ("pmi", "slurm")),
    **{
        f"srun-pmi2-without-{name}": (
            step(3, **{**PMI2, name: ""}),
            ("Slurm", 3, 1, 4),
            2,
            ("slurm",),
        )
        for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE")
    },
    "srun-that-agrees": (
        step(3) | {"RANK": "3", "LOCAL_RANK": "1"},
        ("Slurm", 3, 1, 4),
        2,
        ("slurm",),
    ),
    "srun-pmix": (step(3) | PMIX, ("Slurm", 3, 1, 4), 2, ("slurm", "mpi")),
    "srun-pmix-arbitrary": (
        step(3, SLURM_DISTRIBUTION="arbitrary") | PMIX,
        ("Slurm", 3, 1, 4),
        2,
        ("mpi", "slurm"),
    ),
    "srun-pty": (step(3, SLURM_PTY_PORT="40001"), ("Slurm", 3, 1, 4), 2, ("slurm",)),
    "srun-of-a-wrapper-in-a-pty-shell": (nested_in_pty_shell(3), ("Slurm", 3, 1, 4), 2, ("slurm",)),
    "open-mpi-5": (open_mpi(1), ("Open MPI", 1, 1, 2), 2, ("mpi",)),
    "open-mpi-4": (open_mpi(1) | OPEN_MPI_4, ("Open MPI", 1, 1, 2), 2, ("mpi",)),
    "open-mpi-two-nodes": (open_mpi(3, 4, 1, 2), ("Open MPI", 3, 1, 4), 2, ("mpi",)),
    "mpich": (hydra(1), ("Hydra", 1, 1, 2), 2, ("pmi", "mpi")),
    "mpich-two-nodes": (hydra(3, 4, 1, 2), ("Hydra", 3, 1, 4), 2, ("pmi", "mpi")),
    "intel-mpi": (hydra(1) | INTEL, ("Intel MPI", 1, 1, 2), 2, ("pmi", "mpi")),
    "pals": (PALS, ("PALS", 3, 1, 4), 2, ("mpi",)),
    "mvapich2": (MVAPICH2, ("MVAPICH2", 1, 1, 2), None, ("pmi", "mpi")),
    "jsrun": (JSRUN, ("jsrun", 5, 2, 6), None, ("mpi",)),
    "flux": (FLUX, ("Flux", 1, 1, 2), None, ("pmi", "mpi")),
    "explicit": (EXPLICIT, ("explicit variables", 1, 1, 2), None, ("env",)),
    "explicit-with-ranks-here": (
        EXPLICIT | {"LOCAL_WORLD_SIZE": "2"},
        ("explicit variables", 1, 1, 2),
        2,
        ("env",),
    ),
    "torchrun": (
        EXPLICIT | {"TORCHELASTIC_RUN_ID": "none"},
        ("explicit variables", 1, 1, 2),
        None,
        ("env",),
    ),
    "mpirun-in-a-batch-job": (batch_body() | open_mpi(1), ("Open MPI", 1, 1, 2), 2, ("mpi",)),
    # Its ranks inherit PMI_FD, whose socket knows the daemon alone.
    "mpirun-in-srun-pmi2": (
        daemon_step(0) | PMI2 | open_mpi(1),
        ("Open MPI", 1, 1, 2),
        2,
        ("mpi",),
    ),
    "srun-that-agrees-with-open-mpi": (
        step(3) | open_mpi(3, 4, 1, 2),
        ("Open MPI", 3, 1, 4),
        2,
        ("mpi",),
    ),
    "half-of-open-mpi": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        ("none", 0, 0, 1),
        1,
        (),
    ),
    "nothing": ({}, ("none", 0, 0, 1), 1, ()),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_is_recognised_by_what_it_tells(
    launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each value says which variable decided it."""
    variables, expected, local_world_size, channels = LAUNCHERS[launcher]
    for name in {name for known, *_ in LAUNCHERS.values() for name in known}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for found in (detect(variables), detect(os.environ)):
        assert who(found) == expected
        assert (found.local_world_size, found.channels, found.notes) == (
            local_world_size,
            channels,
            (),
        )
        if channels:
            for field in ("rank", "local_rank", "world_size"):
                name, _, value = found.sources[field].partition("=")
                assert variables[name] == value == str(getattr(found, field))


def test_the_node_is_slurms_name_and_one_is_known_as_one() -> None:
    assert detect(step(3)).node == "node03"
    assert detect({}).node == socket.gethostname()
    assert detect(open_mpi(1)).one_node
    assert not detect(step(3)).one_node
    assert not detect(MVAPICH2).one_node  # nothing tells
    assert detect({}).one_node


def test_without_mpi4py_mpi_is_no_channel(mpi4py: Callable[[bool], None]) -> None:
    mpi4py(False)
    assert detect(step(3) | PMIX).channels == ("slurm",)
    assert detect(hydra(1)).channels == ("pmi",)
    assert "pip install mpi4py" in refused(open_mpi(1))
    assert who(detect(open_mpi(0, 1))) == ("Open MPI", 0, 0, 1)


# The innermost launcher wins.


@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("make", [open_mpi, hydra])
def test_mpirun_in_an_allocation_beats_slurm(
    make: Callable[[int, int, int, int], dict[str, str]], rank: int
) -> None:
    """All ranks of a node inherit the SLURM_PROCID of the daemon that srun started there."""
    found = detect(daemon_step(rank // 2) | make(rank, 6, rank % 2, 2))
    assert who(found)[1:] == (rank, rank % 2, 6)
    assert found.launcher in ("Open MPI", "Hydra")
    assert "slurm" not in found.channels


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        # SLURM_TASK_PID is this process: srun started it itself, so a stale OMPI_* is no inner
        # launcher.
        (
            step(3) | open_mpi(0),
            (
                "OMPI_COMM_WORLD_RANK=0 of OMPI_COMM_WORLD_SIZE=2, and SLURM_PROCID=3 of"
                " SLURM_STEP_NUM_TASKS=4"
            ),
        ),
        (
            open_mpi(0, 4) | hydra(1, 2),
            "OMPI_COMM_WORLD_RANK=0 of OMPI_COMM_WORLD_SIZE=4, and PMI_RANK=1 of PMI_SIZE=2",
        ),
        (
            step(3) | PMI2 | {"PMI_SIZE": "1"},
            "SLURM_PROCID=3 of SLURM_STEP_NUM_TASKS=4, and PMI_RANK=3 of PMI_SIZE=1",
        ),
    ],
)
def test_two_launchers_that_disagree_are_refused(variables: dict[str, str], named: str) -> None:
    assert refused(variables).startswith(
        f"two launchers disagree: {named}; expected one launcher -> "
    )


@pytest.mark.parametrize("around", [{}, batch_body(), JOB])
def test_prterun_is_refused_with_the_hint(around: dict[str, str]) -> None:
    plain = {
        "PMIX_RANK": "1",
        "PMIX_NAMESPACE": "prterun-n1-9@1",
        "PMIX_HOSTNAME": "n1",
        "PRTE_LAUNCHED": "1",
    }
    text = refused(around | plain)
    assert "PMIX_RANK=1" in text
    assert "start with Open MPI's mpirun instead of prterun" in text


@pytest.mark.parametrize("value", ["", "one", "-1", "1.0", " 1"])
def test_a_rank_that_is_no_number_is_named(value: str) -> None:
    assert f"OMPI_COMM_WORLD_RANK={value!r}" in refused(
        open_mpi(1) | {"OMPI_COMM_WORLD_RANK": value}
    )
    assert f"SLURM_LOCALID={value!r}" in refused(step(1) | {"SLURM_LOCALID": value})


# A real step is told from what merely inherits its variables.


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        (batch_body(), "an allocation"),
        (JOB, "an allocation"),
        (interactive_step(), "an allocation"),
        (interactive_step("-6"), "an allocation"),
        (
            batch_body() | {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "1"},
            "an allocation",
        ),
        (pty_shell(3), "a shell of srun --pty"),
    ],
    ids=["batch", "salloc", "interactive", "interactive-negative", "batch-step-id", "pty"],
)
def test_a_jobs_shell_is_a_world_of_one_and_says_so(variables: dict[str, str], where: str) -> None:
    found = detect(variables)
    assert who(found) == ("none", 0, 0, 1)
    assert found.channels == ()
    (note,) = found.notes
    assert where in note
    assert "start with `srun" in note


@pytest.mark.parametrize(
    "name", ["SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE"]
)
@pytest.mark.parametrize("lie", ["", "1", "8", "4(x2)", "nonsense"])
def test_the_jobs_variables_may_lie(name: str, lie: str) -> None:
    found = detect(step(3, **{name: lie}))
    assert who(found) == ("Slurm", 3, 1, 4)
    assert found.local_world_size == 2


def test_a_job_with_only_capital_n_is_understood() -> None:
    """``srun -N 2`` sets neither NTASKS nor NTASKS_PER_NODE. Below a wrapper that does not exec, it
    is a step too.
    """
    tasks = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
    }
    found = detect(
        step(1, SLURM_NTASKS="", SLURM_TASKS_PER_NODE="", SLURM_GTIDS="1", **tasks), pid=PID + 1
    )
    assert (who(found), found.local_world_size) == (("Slurm", 1, 0, 2), 1)


# Explicit variables.


@pytest.mark.parametrize("missing", EXPLICIT)
def test_partial_explicit_variables_name_the_missing_one(missing: str) -> None:
    text = refused(EXPLICIT | {missing: ""})
    assert text == refused({name: value for name, value in EXPLICIT.items() if name != missing})
    there, _, rest = text.partition(" set, ")
    assert rest.startswith(f"{missing} missing; ")
    assert set(there.replace(" and ", ", ").split(", ")) == set(EXPLICIT) - {missing}
    assert text == refused(step(3) | EXPLICIT | {missing: ""}, "env")
    found = detect(step(3) | EXPLICIT, "env")
    assert who(found) == ("explicit variables", 1, 1, 2)
    assert (found.channels, found.notes, found.master) == (("env",), (), ("10.0.0.1", 29500))


@pytest.mark.parametrize("only", EXPLICIT)
def test_a_single_explicit_variable_names_the_four_missing(only: str) -> None:
    found = refused({only: EXPLICIT[only]}).partition(";")[0]
    assert found.startswith(f"{only} set, ")
    assert all(name in found for name in EXPLICIT)
    assert "start the script with srun" in refused(batch_body() | {only: EXPLICIT[only]})


WRONG = {
    "RANK": ("2", "-1", "x"),
    "WORLD_SIZE": ("0", "1"),
    "LOCAL_RANK": ("0.5",),
    "MASTER_PORT": ("http", "0", "65536", "-1"),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_wrong_explicit_variable_is_named_with_its_value(name: str, value: str) -> None:
    text = refused(EXPLICIT | {name: value})
    assert name in text
    assert value in text


@pytest.mark.parametrize(
    "variables", [step(3), open_mpi(3, 4, 1, 2), hydra(3, 4, 1, 2)], ids=["slurm", "ompi", "hydra"]
)
@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "3"), ("RANK", "")]
)
def test_a_rank_that_contradicts_the_launcher_is_refused(
    variables: dict[str, str], name: str, value: str
) -> None:
    text = refused(variables | {name: value})
    assert text.startswith(f"{name}={value}, but ")
    assert f"remove `export {name}`" in text
    assert "--channel env" in text


@pytest.mark.parametrize(
    "master",
    [
        {"MASTER_ADDR": "node01"},
        {"MASTER_PORT": "29500"},
        {"MASTER_ADDR": "", "MASTER_PORT": "nonsense"},
    ],
)
def test_master_variables_below_a_launcher_are_ignored(master: dict[str, str]) -> None:
    found = detect(step(3) | master)
    assert who(found) == ("Slurm", 3, 1, 4)
    assert found.master is None
    (note,) = found.notes
    assert all(f"{name}={value}" in note for name, value in master.items())
    assert "ignored" in note


# Forced channels.


@pytest.mark.parametrize(
    ("variables", "channel"),
    [
        (step(3) | PMI2, "pmi"),
        (step(3) | PMI2, "slurm"),
        (step(3) | PMIX, "mpi"),
        (step(3) | PMIX, "slurm"),
        (hydra(1), "mpi"),
        (hydra(1), "pmi"),
        (open_mpi(1), "mpi"),
    ],
)
def test_a_forced_channel_is_the_only_one(variables: dict[str, str], channel: str) -> None:
    assert detect(variables, channel).channels == (channel,)


@pytest.mark.parametrize(
    ("variables", "channel", "there"),
    [
        (step(3), "pmi", "slurm, env"),
        (step(3), "mpi", "slurm, env"),
        (step(3) | PMIX, "pmi", "slurm, mpi, env"),
        (open_mpi(1), "pmi", "mpi, env"),
        (open_mpi(1), "slurm", "mpi, env"),
        (daemon_step(0) | open_mpi(1), "slurm", "mpi, env"),
        (EXPLICIT, "slurm", "env"),
        *(({}, channel, "") for channel in ("mpi", "pmi", "slurm")),
    ],
)
def test_a_forced_channel_that_is_not_there_is_refused(
    variables: dict[str, str], channel: str, there: str
) -> None:
    text = refused(variables, channel)
    assert text.startswith(
        f"--channel {channel} is not available under " if there else f"--channel {channel}, and no "
    )
    assert f"expected {f'one of {there}' if there else 'a launcher'} ->" in text


def test_a_world_of_one_takes_any_forced_channel() -> None:
    """The same job script with one task must not fail for want of a channel."""
    alone = {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NODELIST": "node01",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    for channel in ("mpi", "pmi", "slurm"):
        assert detect(step(**alone, SLURM_GTIDS="0"), channel).world_size == 1
        assert detect(open_mpi(0, 1), channel).world_size == 1
