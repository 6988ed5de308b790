"""What each launcher tells its processes, as recorded in the launchers' sources and on real
machines.
"""

from __future__ import annotations

PID = 4711  # of the process under test, wherever a test does not say otherwise

# What a job gives to all of its processes, be they ranks or not.
JOB = {
    "SLURM_JOB_ID": "1207",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node[01-03]",
    "SLURM_NODELIST": "node[01-03]",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "6",
    "SLURM_TASKS_PER_NODE": "2(x3)",
}


def step(rank: int = 0, /, **changes: str) -> dict[str, str]:
    """One task of ``srun -n 4 -N 2`` on nodes 2 and 3 of a job of three; an empty change removes
    the variable.
    """
    first = rank - rank % 2
    variables = JOB | {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[02-03]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_GTIDS": f"{first},{first + 1}",
        "SLURM_TASK_PID": str(PID),
        "SLURMD_NODENAME": f"node{2 + rank // 2:02d}",
    }
    return {name: value for name, value in (variables | changes).items() if value}


def batch_body() -> dict[str, str]:
    """``python train.py`` in a job script, without srun: rank 0 of 6, says Slurm, and no step."""
    return JOB | {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0",
        "SLURM_TASK_PID": "4000",
        "SLURMD_NODENAME": "node01",
    }


def interactive_step(step_id: str = "4294967290") -> dict[str, str]:
    """The shell that salloc opens on a node where LaunchParameters=use_interactive_step."""
    return step(
        SLURM_STEP_ID=step_id,
        SLURM_STEP_NUM_TASKS="1",
        SLURM_STEP_NODELIST="node01",
        SLURM_STEP_TASKS_PER_NODE="1",
        SLURM_GTIDS="0",
        SLURM_TASK_PID="4000",
        SLURM_PTY_PORT="40001",
    )


def pty_shell(rank: int = 0) -> dict[str, str]:
    """A program that was typed into the shell of ``srun -n 4 --pty bash``, which is process
    4000.
    """
    return step(rank, SLURM_TASK_PID="4000", SLURM_PTY_PORT="40001", SLURM_PTY_WIN_COL="80")


def nested_in_pty_shell(rank: int = 0) -> dict[str, str]:
    """A wrapper's child, where ``srun wrapper.sh`` was typed into such a shell: the wrapper is
    process 4001.
    """
    return pty_shell(rank) | {"SLURM_TASK_PID": "4001"}


def open_mpi(
    rank: int, size: int = 2, local_rank: int | None = None, local_size: int | None = None
) -> dict[str, str]:
    """Open MPI 5 without Slurm; 4 has OMPI_MCA_orte_hnp_uri besides. NODE_RANK is not the
    node's.
    """
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size if local_size is None else local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(rank if local_rank is None else local_rank),
        "OMPI_VERSION": "5.0.11",
        "PMIX_RANK": str(rank),
        "PMIX_NAMESPACE": "prterun-node01-77@1",
        "PMIX_HOSTNAME": "node01",
        "PRTE_LAUNCHED": "1",
    }


def hydra(
    rank: int, size: int = 2, local_rank: int | None = None, local_size: int | None = None
) -> dict[str, str]:
    """MPICH's mpiexec.hydra."""
    return {
        "PMI_FD": "9",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank if local_rank is None else local_rank),
        "MPI_LOCALNRANKS": str(size if local_size is None else local_size),
        "HYDI_CONTROL_FD": "7",
        "PMI_HOSTNAME": "node01",
    }


def daemon_step(daemon: int = 0) -> dict[str, str]:
    """What mpirun's ranks inherit inside an allocation: the variables of the daemon that srun
    started.
    """
    return step(
        daemon,
        SLURM_STEP_NUM_TASKS="3",
        SLURM_STEP_NODELIST="node[01-03]",
        SLURM_STEP_TASKS_PER_NODE="1(x3)",
        SLURM_LOCALID="0",
        SLURM_GTIDS=str(daemon),
        SLURM_TASK_PID="4000",
        SLURMD_NODENAME=f"node{daemon + 1:02d}",
    )
