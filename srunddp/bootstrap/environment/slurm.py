"""Read the variables that Slurm sets for a task of a job step.

Nodes and tasks are taken from the step's variables. The job's variables (``SLURM_NODELIST``,
``SLURM_NTASKS``) are not used, because they describe the whole allocation, and a step may run on a
part of it.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from operator import or_

from srunddp.bootstrap.environment.types import SlurmStep
from srunddp.errors import ConfigError, Scope
from srunddp.util.cuda_visible import NO_GPU
from srunddp.util.hostlist import LONGEST_LIST, expand, shortened
from srunddp.util.kernel_file import stat_fields
from srunddp.util.slurm_tres import tres_count

STEP_ID = "SLURM_STEP_ID"
RANK = "SLURM_PROCID"
LOCAL_RANK = "SLURM_LOCALID"
WORLD_SIZE = "SLURM_STEP_NUM_TASKS"
NODE_LIST = "SLURM_STEP_NODELIST"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
RANKS_HERE = "SLURM_GTIDS"
NODE_NAME = "SLURMD_NODENAME"
# The variables by which Slurm or the user limits the GPUs that a process sees, NVIDIA's and AMD's.
_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# How srun binds GPUs to tasks, such as gres/gpu:per_task:2; Slurm 22.05 writes gpu:per_task:2.
_BINDING = "SLURMD_TRES_BIND"

# The batch script, the interactive shell and the extern step have ids from here on; some versions
# of Slurm print these ids as negative numbers.
_FIRST_RESERVED_STEP = 0xFFFFFFF0
_REWRITTEN = "something rewrote Slurm's variables; start srunddp directly with srun"


def in_allocation(variables: Mapping[str, str]) -> bool:
    """Whether a process is in a Slurm job at all: in a step, a batch script or a shell."""
    return "SLURM_JOB_ID" in variables


def in_step(variables: Mapping[str, str]) -> bool:
    """Whether these variables are those of a task of a real step, not of a batch script or a
    shell.
    """
    step = variables.get(STEP_ID, "")
    # An id has 32 bits, at most 10 digits. A negative number is a reserved id, and does not match.
    real = bool(re.fullmatch("[0-9]{1,10}", step)) and int(step) < _FIRST_RESERVED_STEP
    return real and all(name in variables for name in (RANK, LOCAL_RANK, WORLD_SIZE))


def has_own(variables: Mapping[str, str], local_world_size: int, visible: int) -> bool:
    """Whether Slurm shows each rank several GPUs of its own, as with ``--gpus-per-task=2``, instead
    of showing all ranks the same GPUs.

    Args:
        variables: the rank's environment variables.
        local_world_size: the number of ranks on this node.
        visible: the number of GPUs that the rank sees.
    """
    if visible < 2 or local_world_size < 2:
        return False
    tasks_here = variables.get(RANKS_HERE, "")
    if tasks_here and len(tasks_here.split(",")) != local_world_size:
        # The ranks are not Slurm's tasks: mpirun has started several ranks in one task of Slurm,
        # and these ranks share the task's GPUs.
        return False
    if visible in _gpus_per_task(variables):
        return True
    # For example SLURM_STEP_GPUS=0,1,2,3 and two ranks that see two GPUs each: then no GPU is seen
    # by both.
    step = variables.get("SLURM_STEP_GPUS", "")
    if step and len(step.split(",")) == visible * local_world_size:
        return True
    masks = _masks(variables.get(_BINDING, ""), local_world_size)
    return bool(masks) and sum(map(int.bit_count, masks)) == reduce(or_, masks).bit_count()


def gpus_here(variables: Mapping[str, str]) -> int:
    """Return how many of the GPUs that Slurm has allocated on this node this process may use; 0 if
    Slurm's variables name none.

    Args:
        variables: the rank's environment variables.
    """
    if not in_allocation(variables):
        return 0
    given = variables.get("SLURM_GPUS_ON_NODE", "")
    if not re.fullmatch("[0-9]{1,6}", given):
        return 0
    count = int(given)
    # If Slurm has bound a GPU to each task, or the user has chosen some GPUs, this process sees
    # fewer GPUs than Slurm has allocated on the node.
    for name in _VISIBLE_GPUS:
        shown = variables.get(name)
        if shown in NO_GPU:
            return 0
        if shown is not None:
            count = min(count, len(shown.split(",")))
    return count


def _gpus_per_task(variables: Mapping[str, str]) -> Iterator[int]:
    """Yield each number of GPUs per task that a variable gives.

    Up to Slurm 23.02, ``SLURM_GPUS_PER_TASK`` has the option's value from sbatch and salloc. Since
    23.11, ``SLURM_TRES_PER_TASK`` also has the value from srun. In all versions,
    ``SLURMD_TRES_BIND`` has the binding that srun derived from the option.
    """
    asked = variables.get("SLURM_GPUS_PER_TASK", "")
    yield tres_count(",".join(f"gres/gpu:{part}" for part in asked.split(",") if part), "gres/gpu")
    yield tres_count(variables.get("SLURM_TRES_PER_TASK", ""), "gres/gpu")
    for bound in re.findall(r"gpu:(?:verbose,)?per_task:(\d{1,6})", variables.get(_BINDING, "")):
        yield int(bound)


def _masks(binding: str, tasks: int) -> list[int]:
    """Return the GPUs of each task on this node as bit masks, from ``gres/gpu:mask:0x3,0xc``; empty
    if the binding is of another form.
    """
    listed = re.search(r"gpu:(?:verbose,)?mask(?:_gpu)?:([^+]+)", binding)
    if not listed:
        return []
    masks: list[int] = []
    for part in listed[1].split(","):
        mask = re.fullmatch(r"(0[xX][0-9a-fA-F]{1,64}|[0-9]{1,20})(?:\*([0-9]{1,4}))?", part)
        if not mask:
            return []
        masks += [int(mask[1], 0)] * int(mask[2] or 1)
    return [masks[task % len(masks)] for task in range(tasks)]


def read_step(variables: Mapping[str, str], pid: int) -> SlurmStep:
    """Read the variables of a step.

    Args:
        variables: the environment variables of a process, for which :func:`in_step` is true.
        pid: the id of this process; 0 if it is on another machine.

    Raises:
        ConfigError: a variable does not parse, or two of them contradict each other.
    """
    nodes = tuple(expand(variables.get(NODE_LIST, ""), where=NODE_LIST))
    step = SlurmStep(
        job=_digits(variables, "SLURM_JOB_ID", 20),
        step=_digits(variables, STEP_ID, 20),
        # Not set in a job's first start.
        restarts=_digits(variables, "SLURM_RESTART_COUNT", 20),
        rank=parse_uint(variables, RANK),
        world_size=parse_uint(variables, WORLD_SIZE),
        nodes=nodes,
        tasks_per_node=tuple(task_counts(variables.get(TASKS_PER_NODE, ""))),
        ranks_here=tuple(_numbers(variables.get(RANKS_HERE, ""), where=RANKS_HERE)),
        # A host file means -m arbitrary, even if the option was not given.
        distribution="arbitrary"
        if "SLURM_HOSTFILE" in variables
        else variables.get("SLURM_DISTRIBUTION", "block"),
        reserved_ports=tuple(
            _numbers(variables.get("SLURM_STEP_RESV_PORTS", ""), where="SLURM_STEP_RESV_PORTS")
        ),
        # Every step of a heterogeneous job has SLURM_HET_SIZE, even a step within one component.
        heterogeneous="SLURM_HET_SIZE" in variables and not _in_one_component(variables, nodes),
        # slurmstepd sets SLURM_TASK_PID to the id of its own child. If that is a daemon of mpirun,
        # the daemon's ranks inherit the number.
        direct=variables.get("SLURM_TASK_PID") == str(pid),
        typed="SLURM_PTY_PORT" in variables
        and is_interactive_shell(variables.get("SLURM_TASK_PID", "")),
    )
    _check(step)
    return step


def _in_one_component(variables: Mapping[str, str], nodes: tuple[str, ...]) -> bool:
    """Whether all nodes of a step of a heterogeneous job are in one component, as with ``srun
    --het-group=0``.
    """
    lists = {
        name: value
        for name, value in variables.items()
        if name.startswith("SLURM_JOB_NODELIST_HET_GROUP_")
    }
    # The step is within one component if exactly one list contains all its nodes. If several do, or
    # none does, or no list is set, nothing proves it.
    return [{*nodes} <= {*expand(value, where=name)} for name, value in lists.items()].count(
        True
    ) == 1


def is_interactive_shell(task: str) -> bool:
    """Whether the task with this process id is an interactive shell, and the user typed the command
    of this process into it.

    Such a shell has a terminal, and starts each command in its own process group. A script that
    srun started as the task has no job control. If the user starts another step from the shell, the
    step's tasks inherit the shell's variables, but they have no terminal. In a container the
    process id may mean nothing; then the answer is whether this process has a terminal.
    """
    try:
        return _has_terminal(task) and os.getpgid(int(task)) != os.getpgrp()
    except (OSError, ValueError):
        return _has_terminal("self")


def _has_terminal(pid: str) -> bool:
    # Field tty_nr of proc(5): 0 for a process without a controlling terminal.
    return stat_fields(pid)[4] != "0"


def _check(step: SlurmStep) -> None:
    if step.rank >= step.world_size:
        found = f"with {WORLD_SIZE}={step.world_size}"
        expected = f"a rank from 0 to {step.world_size - 1}"
    elif step.ranks_here and step.rank not in step.ranks_here:
        found = f"is not in {RANKS_HERE}={','.join(map(str, step.ranks_here))}"
        expected = "the rank among the ranks of its node"
    else:
        return
    raise ConfigError(f"{RANK}={step.rank} {found}", expected=expected, hint=_REWRITTEN)


def parse_uint(variables: Mapping[str, str], name: str) -> int:
    """Return the value of an environment variable that holds a whole number from 0 up.

    Args:
        variables: the rank's environment variables.
        name: the variable's name; if it is not set, the result is 0.

    Raises:
        ConfigError: the value is something else, or has more than 9 digits.
    """
    return int(_digits(variables, name, 9))


def _digits(variables: Mapping[str, str], name: str, most: int) -> str:
    value = variables.get(name, "0")
    # Not \d, which also matches the digits of other scripts. The length is limited because int()
    # raises a ValueError for more than 4,300 digits.
    if not re.fullmatch(f"[0-9]{{1,{most}}}", value):
        raise ConfigError(
            f"{name}={shortened(value)!r}",
            expected="a whole number",
            hint=f"correct {name} or remove it from the environment",
        )
    return value


def task_counts(counts: str) -> list[int]:
    """Expand Slurm's compressed counts: ``3,1(x2)`` gives ``[3, 1, 1]``.

    Raises:
        ConfigError: the text has another form, or stands for more than ``LONGEST_LIST`` counts.
    """
    expanded: list[int] = []
    if counts:
        for part in counts.split(","):
            match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
            # Check the length before expanding: `1(x999999)` many times over would fill the memory.
            repeated = int(match[2] or 1) if match else 0
            if not match or len(expanded) + repeated > LONGEST_LIST:
                raise ConfigError(
                    f"{TASKS_PER_NODE}={shortened(counts)!r}",
                    expected="counts like 4(x2),3",
                    hint=_REWRITTEN,
                    scope=Scope.JOB,
                )
            expanded.extend([int(match[1])] * repeated)
    return expanded


def fold_counts(counts: Iterable[int]) -> str:
    """Write counts as Slurm does, for :func:`task_counts`: ``3,1(x2)`` for 3, 1 and 1."""
    runs = [(count, len(list(same))) for count, same in itertools.groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)


def _numbers(text: str, where: str) -> Iterator[int]:
    if text:
        # Slurm writes these numbers without brackets, as in `12000-12003,12010`. In brackets they
        # are a host list whose names have no letters, which expand() reads.
        return (int(number) for number in expand(f"[{text}]", where=where))
    return iter(())
