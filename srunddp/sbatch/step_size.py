"""Writes srun's options for a step that has one task for each rank of a launch."""

import re
from collections.abc import Mapping, Sequence

from srunddp.sbatch.bash_variables import Variable
from srunddp.sbatch.launch import Launch

# Options of srun for the size of the job step: how many nodes, tasks and CPUs it has.
_SIZE = re.compile(
    r"-[Nnc].*|--(?:nodes|n?tasks(?:-per-(?:node|gpu|core|socket))?|cpus-per-(?:task|gpu))(?:=.*)?",
    re.DOTALL,
)
_VARIABLE = re.compile(r"\"?\$\{?(\w+)(?:\[[@*]\])?\}?\"?")
# Options of srun without a value, which are often written before a command.
_FLAGS = re.compile(
    r"-[luKkvQsEOX]|--(label|unbuffered|no-kill|verbose|quiet|exclusive|overlap|oversubscribe|exact"
    r"|pty|kill-on-bad-exit|contiguous)"
)


def size_options(text: str, launch: Launch) -> list[str]:
    """Return srun's options for as many tasks as the launcher would start processes, and so that
    these tasks end and see GPUs as the launcher's processes do.

    Args:
        text: The job script.
        launch: The launch.
    """
    values = launch.given.values
    nodes = _nodes(launch)
    # accelerate's option counts the processes of all nodes, that of other launchers the processes
    # of one node.
    total = values.get("num-processes")
    if total:
        each = total if nodes == "1" else _calculated(f"{total} / {nodes}")
    elif launch.is_deepspeed:
        each = _processes_per_node(values.get("num-gpus", "gpu"))
    elif "config-file" in values:
        each = "$SLURM_GPUS_ON_NODE"  # only in a hint: the file of values has the number
    elif launch.is_accelerate:
        # This occurs only in a hint, which tells the user to add the number.
        each = "GPUS"
    else:
        each = _processes_per_node(values.get("nproc-per-node", "1"))
    size = {
        "nodes": nodes,
        "ntasks": total or _calculated(f"{nodes} * {each}"),
        "ntasks-per-node": each,
        # Give each task its part of the node's CPUs. The job's own number of CPUs for each task is
        # often that for one task on a node.
        "cpus-per-task": _calculated(f"$SLURM_CPUS_ON_NODE / {each}"),
    }
    words = [f"--{name}={_quoted(value)}" for name, value in size.items()]
    # As under torchrun, the first process that fails ends all others.
    words.append("--kill-on-bad-exit=1")
    if re.search(r"^#SBATCH\s.*(gpu|-G)", text, re.MULTILINE):
        # As under torchrun, each process sees all GPUs of its node.
        words.append("--gpu-bind=none")
    return words


def _nodes(launch: Launch) -> str:
    """Return the number of nodes of a launch, or a variable that bash replaces by the number."""
    values = launch.given.values
    nodes = values.get("nnodes") or values.get("num-machines") or values.get("num-nodes")
    if not nodes:
        # With a host file, deepspeed uses all nodes of the file; accelerate's file of values has
        # the number of nodes.
        return "$SLURM_NNODES" if {"hostfile", "config-file"} & values.keys() else "1"
    least, _, most = nodes.partition(":")
    if most and least != most:
        return "$SLURM_NNODES"  # for a range such as 2:4, the nodes that the job has
    return least


def _processes_per_node(each: str) -> str:
    """Return the number of processes that a value of ``--nproc-per-node`` means, or a variable that
    bash replaces by the number.
    """
    if each.isdecimal() or each.startswith(("$", "`")):
        return each
    if each == "cpu":
        return "$SLURM_CPUS_ON_NODE"
    return "$SLURM_GPUS_ON_NODE"  # for the values gpu and auto


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search("[$`]", value) else value


def _calculated(product: str) -> str:
    """Return a product or a quotient: calculated here if both sides are numbers, else as an
    expression that bash calculates when the job starts.
    """
    if found := re.fullmatch(r"(\d+) ([*/]) (\d+)", product):
        left = int(found[1])
        right = int(found[3])
        if found[2] == "*":
            return str(left * right)
        return str(left // max(right, 1))
    if not re.search(r"[$][(]|`", product):
        # Remove the $ before variables, which bash's arithmetic does not need. Inside $(…) and
        # backticks bash needs it, so leave a text with these as it is.
        product = re.sub("[$](?=[A-Za-z_])", "", product)
    return f"$(({product}))"


def first_option(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words after srun into the first option, with its value, and the other words."""
    option = [words[0]]
    left = list(words[1:])
    takes_value = re.fullmatch(r"-\w|--[\w-]+", option[0]) and not _FLAGS.fullmatch(option[0])
    if takes_value and left and not left[0].startswith("-"):
        option.append(left.pop(0))  # the next word is probably the option's value
    return option, left


def has_size(words: Sequence[str]) -> bool:
    """Tell whether one of some words is an option of srun for the size of the job step."""
    return any(_SIZE.fullmatch(each) for each in words)


def split_options(
    words: Sequence[str], values: Mapping[str, Variable]
) -> tuple[list[list[str]], list[str]]:
    """Split the words after srun into its options, each with its value, and its command.

    Args:
        words: The words after srun.
        values: The variables of the script, by name. A variable whose value begins with a dash
            counts as an option.
    """
    options = []
    left = list(words)
    while left:
        if left[0].startswith("-"):
            option, left = first_option(left)
            options.append(option)
        elif options_in(left[0], values):
            options.append([left.pop(0)])
        else:
            break
    return options, left


def options_in(word: str, values: Mapping[str, Variable]) -> list[str]:
    """Return the options in the value of a variable, split at blanks; none if the word is no
    variable of the script, or if the variable's value is something else.

    Args:
        word: A word of a command, such as ``$ARGS``.
        values: The variables of the script, by name.
    """
    found = _VARIABLE.fullmatch(word)
    if not found or found[1] not in values:
        return []
    held = re.sub("[()]", " ", values[found[1]].value).split()  # an array has parentheses
    return held if held and held[0].startswith("-") else []


def with_held_options(words: Sequence[str], values: Mapping[str, Variable]) -> list[str]:
    """Return words in which each variable that holds options is replaced by these options."""
    return [each for word in words for each in options_in(word, values) or [word]]


def with_size(
    words: Sequence[str], size: Sequence[str], values: Mapping[str, Variable]
) -> list[str]:
    """Return the words after srun with other options for the step's size.

    The words' own options for the size are removed. The new options come first; but if a variable
    holds such options, they come behind it, because srun takes the last of several options.

    Args:
        words: The words after srun.
        size: The options to add.
        values: The variables of the script, by name.
    """
    options, command = split_options(words, values)
    kept: list[str] = []
    place = 0
    for option in options:
        if _SIZE.fullmatch(option[0]):
            continue
        kept += option
        if has_size(options_in(option[0], values)):
            place = len(kept)
    return [*kept[:place], *size, *kept[place:], *command]
