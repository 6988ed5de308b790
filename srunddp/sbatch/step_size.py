"""Writes srun's options for a step that has one task for each rank of a launch."""

import re
from collections.abc import Mapping, Sequence

from srunddp.sbatch.bash_variables import Variable
from srunddp.sbatch.launch import Launch

# Options of srun for the size of the step.
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
    """Return srun's options for as many tasks as the launcher would start processes."""
    values = launch.given.values
    nodes = _nodes(launch)
    # accelerate counts the processes on all nodes, the others those on one node.
    total = values.get("num-processes")
    if total:
        each = total if nodes == "1" else _calculated(f"{total} / {nodes}")
    elif launch.is_deepspeed:
        each = _processes_per_node(values.get("num-gpus", "gpu"))
    elif "config-file" in values:
        each = "$SLURM_GPUS_ON_NODE"  # only in a hint: the file has the number
    elif launch.is_accelerate:
        # This occurs only in a hint, which tells the user to add the number.
        each = "GPUS"
    else:
        each = _processes_per_node(values.get("nproc-per-node", "1"))
    size = {
        "nodes": nodes,
        "ntasks": total or _calculated(f"{nodes} * {each}"),
        "ntasks-per-node": each,
        # Slurm has divided the node's CPUs among the tasks of the job, of which there was often
        # only one per node.
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
    """Return the number of nodes, or a variable that bash replaces by it."""
    values = launch.given.values
    nodes = values.get("nnodes") or values.get("num-machines") or values.get("num-nodes")
    if not nodes:
        # deepspeed takes all nodes of its file; that of accelerate has their number.
        return "$SLURM_NNODES" if {"hostfile", "config-file"} & values.keys() else "1"
    least, _, most = nodes.partition(":")
    if most and least != most:
        return "$SLURM_NNODES"  # a range; Slurm gives one number in it
    return least


def _processes_per_node(each: str) -> str:
    """Return the number of processes that ``--nproc-per-node`` means, or a variable that bash
    replaces by it.
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
        # In bash's arithmetic a variable's name needs no $. Inside $(…) or backticks it does, so
        # leave these alone.
        product = re.sub("[$](?=[A-Za-z_])", "", product)
    return f"$(({product}))"


def first_option(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the first option, with its value, from the words after srun."""
    option = [words[0]]
    left = list(words[1:])
    takes_value = re.fullmatch(r"-\w|--[\w-]+", option[0]) and not _FLAGS.fullmatch(option[0])
    if takes_value and left and not left[0].startswith("-"):
        option.append(left.pop(0))  # it may be the option's value
    return option, left


def has_size(words: Sequence[str]) -> bool:
    """Tell whether an option for the step's size is among words."""
    return any(_SIZE.fullmatch(each) for each in words)


def split_options(
    words: Sequence[str], values: Mapping[str, Variable]
) -> tuple[list[list[str]], list[str]]:
    """Split the words after srun into its options, each with its value, and its command.

    Args:
        words: The words.
        values: The variables of the script. One whose value begins with a dash holds options.
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
    """Return the options that a variable holds, each without its value if a blank is between them;
    none if the word is no variable of the script, or one that holds something else.
    """
    found = _VARIABLE.fullmatch(word)
    if not found or found[1] not in values:
        return []
    held = re.sub("[()]", " ", values[found[1]].value).split()  # an array's, too
    return held if held and held[0].startswith("-") else []


def with_held_options(words: Sequence[str], values: Mapping[str, Variable]) -> list[str]:
    """Return words with the options that variables hold in the place of the variables."""
    return [each for word in words for each in options_in(word, values) or [word]]


def with_size(
    words: Sequence[str], size: Sequence[str], values: Mapping[str, Variable]
) -> list[str]:
    """Return the words after srun with other options for the step's size.

    They come first, or behind a variable that has such options too: of several, srun takes the
    last.

    Args:
        words: The words after srun.
        size: The options to add.
        values: The variables of the script.
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
