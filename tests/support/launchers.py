"""The environment variables that each launcher sets for its processes, taken from the launchers'
sources and from real machines.
"""

from __future__ import annotations

PID = 4711  # of the process under test, unless a test says otherwise

# The variables that all processes of a job have, ranks or not.
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
    """Return the variables of a task of ``srun -n 4 -N 2``, which runs on the second and third node
    of a job with three nodes.

    Args:
        rank: The task's number.
        changes: Variables that differ; an empty value removes the variable.
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
    """Return the variables of ``python train.py`` in a job script, without srun. They say that the
    process is task 0 of 6, and name no job step.
    """
    return JOB | {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0",
        "SLURM_TASK_PID": "4000",
        "SLURMD_NODENAME": "node01",
    }


def interactive_step(step_id: str = "4294967290") -> dict[str, str]:
    """Return the variables of the shell that salloc opens on a node, with
    ``LaunchParameters=use_interactive_step``.
    """
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
    """Return the variables of a program that was typed into the shell of ``srun -n 4 --pty bash``.
    The shell is process 4000.
    """
    return step(rank, SLURM_TASK_PID="4000", SLURM_PTY_PORT="40001", SLURM_PTY_WIN_COL="80")


def nested_in_pty_shell(rank: int = 0) -> dict[str, str]:
    """Return the variables of a wrapper's child, after ``srun wrapper.sh`` was typed into the shell
    of :func:`pty_shell`. The wrapper is process 4001.
    """
    return pty_shell(rank) | {"SLURM_TASK_PID": "4001"}


def open_mpi(
    rank: int, size: int = 2, local_rank: int | None = None, local_size: int | None = None
) -> dict[str, str]:
    """Return the variables of a rank of Open MPI 5 without Slurm. Open MPI 4 also sets
    OMPI_MCA_orte_hnp_uri. OMPI_COMM_WORLD_NODE_RANK is no number of the node.
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
    """Return the variables of a rank of MPICH's mpiexec.hydra."""
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
    """Return Slurm's variables of mpirun's ranks in an allocation. The ranks inherit them from
    mpirun's daemon on their node, which srun has started.
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
