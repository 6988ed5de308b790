"""``srunddp sbatch --from``: replace the one torchrun or accelerate command of a job script by srun
and srunddp.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from srunddp.errors import ConfigError
from srunddp.sbatch.bash import Command, Word, commands
from srunddp.util.usage_errors import foreign

_NAMED = re.compile(r"[^#]*(torchrun|torch\.distributed\.(run|launch)|accelerate launch)")
# Words before the launcher that have to stay before srun as well.
_BEFORE = re.compile(r"\w+=.*|if|elif|then|do|else|exec|time|!|\{", re.DOTALL)
# Commands before the launcher that srun cannot start, or that may be srun themselves.
_STARTS_IT = re.compile(r"\$.*|(.*/)?(eval|ssh|pdsh|clush|coproc|mpi(run|exec).*)")
# Programs that start the launcher several times, or without the variables that tell a rank.
_ELSEWHERE = re.compile(r"(.*/)?(docker|podman|xargs|parallel)|--(cleanenv|containall)")
_SRUN = re.compile(r"(.*/)?srun")
# Options of torchrun and accelerate without a value. All others take one.
_FLAG = re.compile(
    r"standalone|m|module|no-python|virtual-local-rank|run-path|q|quiet|cpu|mps|tpu|use-.*|multi-gpu|same-network|debug"
    r"|enable-cpu-affinity|dynamo-use-.*|downcast-bf16|fp8-use-.*|(no-)?tpu-cluster|tpu-use-.*"
)
_SAME = ("m", "module", "q", "quiet", "use-env")  # srunddp has them too, or needs none
# Options of srun for the size of the step.
_SIZE = re.compile(r"-[Nnc].*|--(?:nodes|n?tasks(?:-per-node)?|cpus-per-task)(?:=.*)?", re.DOTALL)


_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_PYTHON = re.compile(r"python[\d.]*")
_TALKERS = ("echo", "printf", "which", "command", "type")  # they only mention a launcher


@dataclass(frozen=True)
class _Launch:
    """A command that starts torchrun or accelerate.

    Attributes:
        words: all words of the command.
        before: the number of words before the launcher.
        launcher: the launcher as it is called: ``torchrun``, ``python -m torch.distributed.run``.
        options: the launcher's options: their values by their names without dashes.
        script: SCRIPT and all words after it.
        in_loop: whether the command is in a loop.
    """

    words: Sequence[Word]
    before: int
    launcher: str
    options: dict[str, str]
    script: Sequence[Word]
    in_loop: bool

    @property
    def texts_before(self) -> list[str]:
        """The words before the launcher, without quotes."""
        return [word.text for word in self.words[: self.before]]

    def line(self, text: str) -> int:
        """Return the number of the launcher's line, from 1."""
        return text.count("\n", 0, self.words[self.before].start) + 1


class _Obstacle(NamedTuple):
    """What keeps a launch from being replaced, and a hint for the user."""

    found: str
    hint: str


def convert(path: str) -> tuple[str, list[str]]:
    """Replace the only launch of a job script, and leave all other text as it is.

    Args:
        path: the path of the script.

    Returns:
        The new script, and notes for the user.

    Raises:
        ConfigError: the script cannot be read, does not have exactly one launch, or has one that
            srun cannot replace.
    """
    text = _read(path)
    launches = [launch for command in commands(text) if (launch := _launch(command))]
    named = [number for number, line in enumerate(text.splitlines(), 1) if _NAMED.match(line)]
    if len(launches) != 1:
        raise _not_one(path, [launch.line(text) for launch in launches], named)
    launch = launches[0]
    where = f"{path}:{launch.line(text)}"
    if obstacle := _obstacle(text, launch):
        raise ConfigError(
            obstacle.found,
            expected="one command for all ranks",
            hint=obstacle.hint,
            where=where,
        )
    notes = [f"{where}: {each}" for each in _left_out(launch.options)]
    if launch.launcher.endswith("torch.distributed.launch") and "use-env" not in launch.options:
        notes.append(f"{where}: no --local-rank is passed; the script is to read LOCAL_RANK")
    notes += [
        f"{path}:{number}: torchrun or accelerate, too; this line is left as it is"
        for number in named
        if number != launch.line(text)
    ]
    begin = text[: launch.words[0].start]
    end = text[launch.script[0].start :]
    return f"{begin}{_replacement(text, launch)} {end}", notes


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or 'no text in UTF-8'}",
            expected="a job script",
            hint="correct --from",
        ) from None


def _not_one(path: str, lines: Sequence[int], named: Sequence[int]) -> ConfigError:
    """Make the error for a script that has no launch or several.

    Args:
        path: the path of the script.
        lines: the lines with launches.
        named: the lines that mention a launcher, whether as a command or not.
    """
    found = f"{path}: {len(lines) or 'no'} commands with torchrun or accelerate"
    if named and not lines:
        found += ", but in quotes or the like"
    found += "".join(f", line {number}" for number in lines or named)
    return ConfigError(
        found,
        expected="one such command",
        hint=(
            "replace those in quotes, in variables, or in several commands by hand: srun"
            " srunddp train.py"
        ),
    )


def _launch(command: Command) -> _Launch | None:
    """Return the launch in a command; None if the command has no launcher, or no script for it."""
    words = command.words
    if words[0].text in _TALKERS:
        return None
    for place in range(len(words)):
        if length := _launcher_words(words[place:]):
            break
    else:
        return None
    launcher = " ".join(word.text for word in words[place : place + length])
    options, script = _options(words[place + length :])
    if not script:
        return None
    return _Launch(words, place, launcher, options, script, command.in_loop)


def _launcher_words(words: Sequence[Word]) -> int:
    """Return how many of the first words are the launcher; 0 if the first word begins none."""
    first, *rest = words
    if first.name == "torchrun":
        return 1
    if first.name == "accelerate" and rest and rest[0].text == "launch":
        return 2
    if _PYTHON.fullmatch(first.name):
        # In python -u -m torch.distributed.run, the first -m counts.
        module = next((at for at, word in enumerate(words) if word.text == "-m"), len(words)) + 1
        if module < len(words) and words[module].text in _MODULES:
            return module + 1
    return 0


def _options(words: Sequence[Word]) -> tuple[dict[str, str], Sequence[Word]]:
    """Return the launcher's options by their names without dashes, and the words from SCRIPT on."""
    texts = [word.text for word in words]
    options = {}
    at = 0
    while at < len(texts) and texts[at].startswith("-") and texts[at] != "--":
        name, equals, value = texts[at].lstrip("-").partition("=")
        # torchrun also accepts --nproc_per_node for --nproc-per-node, and -r and -t for two long
        # options.
        name = {"r": "redirects", "t": "tee"}.get(name, name.replace("_", "-"))
        takes_next = not (equals or _FLAG.fullmatch(name))
        if takes_next and at + 1 < len(texts):
            value = texts[at + 1]
        options[name] = value
        at += 2 if takes_next else 1
    if at < len(texts) and texts[at] == "--":
        at += 1
    return options, words[at:]


def _obstacle(text: str, launch: _Launch) -> _Obstacle | None:
    """Return the first reason why srun cannot replace the launch; None if it can."""
    if launch.in_loop:
        return _Obstacle(
            "a launch in a loop",
            "replace a loop over nodes by one srun srunddp; in another loop edit this line",
        )
    if starter := _other_starter(launch):
        return _Obstacle(
            f"{starter} before {launch.launcher}",
            "write this line by hand, so that srun starts the ranks",
        )
    script = launch.script[0].text
    if script.startswith(("$", "`")) and _may_hide_options(launch):
        return _Obstacle(
            f"{script} before the script may hold options", "write the options out on this line"
        )
    if "accelerate" in launch.launcher and "num-processes" not in launch.options:
        return _Obstacle(
            f"{launch.launcher} without --num_processes",
            "add it, and --num_machines, with accelerate's own numbers",
        )
    if "no-python" in launch.options:
        return _Obstacle("--no-python", "replace it by hand: srunddp runs a Python script")
    if _has_gpus_per_task(text, launch):
        return _Obstacle(
            "--gpus-per-task, of which there are more tasks now",
            "write --gpus-per-node in its place first",
        )
    return None


def _other_starter(launch: _Launch) -> str:
    """Return a word before the launcher that starts it in another way than srun would; empty if
    there is none.
    """
    before = launch.texts_before
    for each in before:
        if _ELSEWHERE.fullmatch(each):
            return each
    command = next((each for each in before if not _BEFORE.fullmatch(each)), "")
    return command if _STARTS_IT.fullmatch(command) else ""


def _may_hide_options(launch: _Launch) -> bool:
    """Tell whether a variable in the place of SCRIPT may hold options, with SCRIPT after them."""
    if not launch.options.keys() & {"nnodes", "nproc-per-node", "num-processes"}:
        return True
    rest = (word.text for word in launch.script[1:])
    return any(re.fullmatch(r".*\.py|-m|--(module|n).*", each) for each in rest)


def _has_gpus_per_task(text: str, launch: _Launch) -> bool:
    in_header = re.findall(r"^#SBATCH\s.*", text, re.MULTILINE)
    words = " ".join([*in_header, *launch.texts_before])
    return bool(re.search(r"--gpus-per-task|--tres-per-task[ =]\S*gpu", words))


def _left_out(options: dict[str, str]) -> Iterator[str]:
    """Yield a note for each option that is dropped and that neither srun nor srunddp replaces."""
    for name, value in options.items():
        answer = (foreign(f"--{name}") or ("", "see srunddp run --help"))[1]
        if (
            name not in _SAME
            and value != "0"
            and not answer.startswith(("leave it out", "srun's --n"))
        ):
            yield f"--{name} is left out; here: {answer}"


def _replacement(text: str, launch: _Launch) -> str:
    """Return the text that replaces the command up to SCRIPT."""
    before = [word.source for word in launch.words[: launch.before]]
    step = _step(text, launch.options)
    srun = next((at for at, each in enumerate(before) if _SRUN.fullmatch(each)), None)
    if srun is not None:
        made = [*before[:srun], before[srun], *step, *_without_size(before[srun + 1 :])]
    else:
        # Assignments and the like stay in front of srun.
        place = 0
        while place < len(before) and _BEFORE.fullmatch(before[place]):
            place += 1
        made = [*before[:place], "srun", *step, *before[place:]]
    made.append("srunddp")
    if {"m", "module"} & launch.options.keys():
        made.append("-m")
    return " ".join(made)


def _without_size(words: Sequence[str]) -> Iterator[str]:
    """Yield the words after srun without options for the step's size. srun's command begins at the
    first word that is no option.
    """
    left = list(words)
    while left and left[0].startswith("-"):
        option = [left.pop(0)]
        if re.fullmatch(r"-\w|--[\w-]+", option[0]) and left and not left[0].startswith("-"):
            option.append(left.pop(0))  # it may be the option's value
        if not _SIZE.fullmatch(option[0]):
            yield from option
    yield from left


def _step(text: str, options: dict[str, str]) -> list[str]:
    """Return srun's options for as many tasks as torchrun or accelerate would start processes."""
    nodes = options.get("nnodes") or options.get("num-machines") or "1"
    if ":" in nodes:  # a range from the least to the most nodes; Slurm gives one number in it
        nodes = "$SLURM_NNODES"
    # accelerate counts the processes on all nodes, torchrun those on one node.
    total = options.get("num-processes")
    if total:
        each = _calculated(f"{total} / {nodes}")
    else:
        each = _processes_per_node(options.get("nproc-per-node", "1"))
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
