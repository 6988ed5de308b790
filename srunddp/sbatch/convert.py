"""Converts a job script for ``srunddp sbatch --from``: replaces its one torchrun, accelerate or
deepspeed command by srun and srunddp.

A script is refused, with a hint what to write, if the new command cannot do what the launcher's
command does: see ``_obstacle`` and ``launcher_options``.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from srunddp.errors import ConfigError
from srunddp.sbatch import launcher_options
from srunddp.sbatch.bash import commands, rest_of_line
from srunddp.sbatch.bash_variables import names_in, variables
from srunddp.sbatch.gpus_per_task import GpusPerTask
from srunddp.sbatch.hidden_launch import HiddenLaunch, find_hidden
from srunddp.sbatch.launch import NAMED, Launch, find_launches, line_of
from srunddp.sbatch.python_under_srun import find_python
from srunddp.sbatch.quoted_launch import QuotedLaunch, find_quoted
from srunddp.sbatch.step_size import size_options, split_options, with_held_options, with_size
from srunddp.sbatch.submission import find_submission

# Words before the launcher that have to be before srun in the new command: bash understands them
# only at the beginning of a command.
_BEFORE = re.compile(r"\w+=.*|if|elif|then|do|else|exec|time|!|\{", re.DOTALL)
# Commands before the launcher that srun cannot start. A variable is one of them, because it may
# stand for srun.
_STARTS_IT = re.compile(r"\$.*|(.*/)?(eval|ssh|pdsh|clush|coproc|mpi(run|exec).*)")
# Programs that start the launcher several times, or without the variables that give the rank.
_ELSEWHERE = re.compile(r"(.*/)?(docker|podman|xargs|parallel)")
# Programs that have an option to remove variables, and so those that give the rank; and this
# option.
_EMPTIES = {
    re.compile(r"(.*/)?(singularity|apptainer)"): re.compile(
        r"--(cleanenv|containall)|-[cCefuw]*[eC][cCefuw]*"
    ),
    re.compile(r"(.*/)?env"): re.compile(r"--ignore-environment|-|-[0v]*i.*"),
}
# Programs that write one file for each process that they start. Without an option, the files of all
# processes have the same name.
_PROFILERS = re.compile(r"(.*/)?(nsys|ncu|rocprof.*|py-spy|perf|strace|valgrind|vtune)")
# Words with a placeholder by which the files of ranks have different names.
_OF_A_RANK = re.compile(r".*(%q\{SLURM_PROCID\}|%t|%p|\{pid\}).*")
_SRUN = re.compile(r"(.*/)?srun")
# A mask or a list has one entry for each task. It was written for one task on a node, so it does
# not fit several ranks on a node.
_MASKS = re.compile(r"--(cpu|mem)-bind=.*(mask|map|list).*")
_NO_GPU_BIND = re.compile(r"--gpu-bind[= ]((v|verbose),)?none")
# torchrun reads the variables PET_… in place of options that are not given.
_PET = re.compile(r"^[^#\n]*?\b(PET_[A-Z_]+)=", re.MULTILINE)
# Variables that srun sets anew in each task, to the GPUs of the step.
_DEVICES = re.compile(
    r"(CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|ZE_AFFINITY_MASK|GPU_DEVICE_ORDINAL)=.*",
    re.DOTALL,
)
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
# Variables that a launcher sets anew for each process. If the job script sets them, they are unset
# for srunddp, which refuses wrong values.
_OF_A_PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# A variable in quotes is one word, except "$@" and arrays, which are as many words as they have.
_IS_ONE_WORD = re.compile(r'"[^"@]*"|.*\.py"?', re.DOTALL)
_ONE_COMMAND = "one command for all ranks"
_OTHERS = (
    "move the other commands to a line before, behind srun --ntasks-per-node=1 if each node needs"
    " them: here they would run once a rank"
)


@dataclass(frozen=True)
class Carried:
    """Additions to the new command that do not come from the job script.

    Attributes:
        srun: Options of srun.
        program: The path of srunddp; empty for srunddp in the folder that the script names for its
            launcher, or else in PATH.
        run: Options of ``srunddp run``.
        env: Variables for the ranks, as NAME=VALUE.
    """

    srun: Sequence[str] = ()
    program: str = ""
    run: Sequence[str] = ()
    env: Sequence[str] = ()


class _Obstacle(NamedTuple):
    """The reason why a launch cannot be replaced, and a hint for the user."""

    found: str
    hint: str


def convert(path: str, carried: Carried | None = None) -> tuple[str, list[str]]:
    """Replace the only launch of a job script, and leave all other text unchanged except for
    ``--gpus-per-task`` in its head.

    Args:
        path: The path of the script.
        carried: The additions to the new command; None if there are none.

    Returns:
        The new script, and notes for the user.

    Raises:
        ConfigError: The script cannot be read, does not have exactly one launch, or has one that
            srun cannot replace.
    """
    carried = carried or Carried()
    text = _read(path)
    launches = find_launches(commands(text))
    quoted = None if launches else _unquoted(text)
    if quoted:
        text = quoted.text
        launches = find_launches(commands(text))
    named = [number for number, line in enumerate(text.splitlines(), 1) if NAMED.match(line)]
    if len(launches) != 1:
        raise _not_one(path, text, launches, named, carried)
    launch = launches[0]
    where = f"{path}:{launch.line(text)}"
    if obstacle := _obstacle(text, launch):
        raise ConfigError(
            obstacle.found,
            expected=_ONE_COMMAND,
            hint=obstacle.hint,
            where=where,
        )
    gpus = GpusPerTask.of(text)
    notes = [f"{where}: {each}" for each in _notes(text, launch)]
    if quoted:
        notes.append(f"{where}: {quoted.shell} is left out: it would start only srunddp")
    notes += [
        f"{where}: {each} is left out: the script has its own {each.partition('=')[0]}"
        for each in carried.srun
        if _is_given(each, text, launch)
    ]
    own = launcher_options.run_options(launch.given)
    notes += [
        f"{where}: {each} is left out: the launcher's options say {_among(each, own)}"
        for each in carried.run
        if _among(each, own)
    ]
    if gpus:
        notes.append(f"{path}:{gpus.line}: {gpus.written} -> {gpus.replacement}")
    notes += [
        f"{path}:{number}: torchrun or accelerate as well; this line is left as it is"
        for number in named
        if not launch.line(text) <= number <= line_of(text, launch.words[-1])
    ]
    begin = text[: launch.words[0].start]
    if gpus:
        begin = gpus.replaced(begin)
    end = text[launch.script[0].start :]
    return f"{begin}{_replacement(text, launch, carried)} {end}", notes


def _unquoted(text: str) -> QuotedLaunch | None:
    """Find a launch in quotes that can be replaced, and return the script without the quotes.

    Returns:
        None if there is none. Then the error about a launch in quotes tells the user more.
    """
    quoted = find_quoted(text)
    if not quoted:
        return None
    launches = find_launches(commands(quoted.text))
    if len(launches) != 1 or _obstacle(quoted.text, launches[0]):
        return None
    return quoted


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or 'no text in UTF-8'}",
            expected="a job script",
            hint="correct --from",
        ) from None


def _not_one(
    path: str, text: str, launches: Sequence[Launch], named: Sequence[int], carried: Carried
) -> ConfigError:
    """Make the error for a script that has no launch or several.

    Args:
        path: The path of the script.
        text: The script.
        launches: The launches that are commands.
        named: The numbers of the lines that mention a launcher, as a command or otherwise.
        carried: The additions to the new command.
    """
    if launches:
        lines = [launch.line(text) for launch in launches]
        written = [
            f"line {launch.line(text)}: {_whole_line(text, launch, carried)}"
            f" {rest_of_line(text, launch.words[-1])}".rstrip()
            for launch in launches
        ]
        return ConfigError(
            f"{path}: {len(lines)} commands with torchrun, accelerate or deepspeed"
            + "".join(f", line {number}" for number in lines),
            expected="one such command",
            hint="write by hand, in " + "; in ".join(written),
        )
    if hidden := find_hidden(text):
        return _hidden_error(path, text, hidden, carried)
    found = f"{path}: no commands with torchrun, accelerate or deepspeed"
    if named:
        found += ", but in quotes or the like" + "".join(f", line {number}" for number in named)
    return ConfigError(found, expected="one such command", hint=_hint_without_launch(text))


def _hint_without_launch(text: str) -> str:
    """Return a hint for a script without a launch. It is about the line in which srun starts
    Python, or about the job script that this script submits, if there is such a line.
    """
    if started := find_python(text):
        steps = [
            *([_OTHERS] if started.others else []),
            f"srunddp takes the place of python; write in line {started.line}: {started.written}",
        ]
        return "; ".join(steps)
    if submission := find_submission(text):
        if not submission.script:
            return (
                f"line {submission.line} submits another job: write its script to a file, and"
                " convert that by --from"
            )
        return (
            f"line {submission.line} submits another job script: convert {submission.script} by"
            " --from"
        )
    return (
        "write one task for each GPU, and srunddp for the launcher: srun --ntasks-per-node=GPUS"
        ' --cpus-per-task="$((SLURM_CPUS_ON_NODE / GPUS))" srunddp train.py'
    )


def _hidden_error(path: str, text: str, hidden: HiddenLaunch, carried: Carried) -> ConfigError:
    """Make the error for a launch in quotes or in a variable."""
    launch = hidden.launch
    if hidden.variable:
        place = f"in the variable {hidden.variable}"
    else:
        place = "in quotes"
    found = f"{launch.launcher} {place}"
    if hidden.others:
        found += ", with " + " and ".join(hidden.others)
    steps = []
    if hidden.others:
        steps.append(_OTHERS)
    lost = [
        _unreplaced(text, launch),
        _emptied(launch) or _meant_for_one_task(text, launch),
        _chosen_gpus(text, launch),
    ]
    steps += [f"{each.found}: {each.hint}" for each in lost if each]
    if GpusPerTask.is_read(text):
        steps.append("write the number for SLURM_GPUS_PER_TASK")
    if gpus := GpusPerTask.of(text):
        steps.append(f"write {gpus.replacement} for {gpus.written} in line {gpus.line}")
    elif GpusPerTask.is_unclear(text, _texts_before(text, launch)):
        steps.append("write --gpus-per-node for --gpus-per-task")
    if starter := _other_starter(launch):
        steps.append(f"srun starts the ranks, not {starter}")
        launch = replace(launch, words=launch.words[launch.before :], before=0)
    line = f"{_whole_line(text, launch, carried)} {hidden.rest}".rstrip()
    values = f", with these variables for {launcher_options.VALUES}" if launch.reads_a_file else ""
    if hidden.runs_in:
        steps.append(f"write in line {hidden.runs_in}{values}: {line}")
    else:
        steps.append(f"write as a command{values}: {line}")
    return ConfigError(
        found, expected="a command", hint="; ".join(steps), where=f"{path}:{hidden.line}"
    )


def _whole_line(text: str, launch: Launch, carried: Carried) -> str:
    """Return the command that the user has to write in place of a launch, on one line."""
    script = [word.source for word in launch.script] or ["SCRIPT", "ARGUMENTS"]
    words = " ".join([_replacement(text, launch, carried), *script])
    words = re.sub(r"^((then|do|else|\{) )+", "", words)
    return re.sub(r"\s*\\?\n\s*", " ", words).strip()


def _unreplaced(text: str, launch: Launch) -> _Obstacle | None:
    """Return the first thing that the launcher does and that neither srun nor srunddp can do, with
    an option or without one; None if there is nothing.
    """
    given = launch.given
    if option := launcher_options.refused(given) or launcher_options.needs_quotes(given):
        return _Obstacle(*option)
    if launch.passes_local_rank:
        option_to_add = "--no_local_rank" if launch.is_deepspeed else "--use-env"
        return _Obstacle(
            "--local-rank, which the launcher passes to the script",
            f"let the script read LOCAL_RANK, and add {option_to_add}",
        )
    if launch.is_accelerate:
        return _of_accelerate(text, launch)
    return None


def _of_accelerate(text: str, launch: Launch) -> _Obstacle | None:
    """Return something that accelerate launch does by its defaults, its file of values or its own
    rules, and that srun cannot do; None if there is nothing.
    """
    processes = launch.given.values.get("num-processes")
    if processes is None:
        return _Obstacle(
            f"{launch.launcher} without --num_processes",
            "add it, and --num_machines, with accelerate's own numbers",
        )
    machines = launch.given.values.get("num-machines", "1")
    if processes.isdecimal() and machines.isdecimal() and int(processes) % max(int(machines), 1):
        each = int(processes) // int(machines) + 1
        return _Obstacle(
            f"--num_processes={processes} on --num_machines={machines}",
            f"write --num_processes={each * int(machines)}: all nodes have as many ranks",
        )
    if launch.given.has("cpu") and processes != "1":
        return _Obstacle(
            "--cpu, with which accelerate starts one process",
            "write --num_processes=1, or export ACCELERATE_USE_CPU=true in place of --cpu",
        )
    default = _default_config(text, launch)
    if os.path.isfile(default) and not launch.given.has("cpu"):
        return _Obstacle(
            f"{default}, which {launch.launcher} reads",
            "write its values as options on this line, and rename the file",
        )
    return None


def _default_config(text: str, launch: Launch) -> str:
    """Return the path of the file that ``accelerate config`` writes, as the job would find it."""
    known = dict(os.environ)
    known.update((name, each.value) for name, each in variables(commands(text)).items())
    assigned = [each.partition("=") for each in launch.texts_before if _ASSIGNED.fullmatch(each)]
    known.update((name, value) for name, _, value in assigned)
    cache = known.get("XDG_CACHE_HOME", "~/.cache")
    home = known.get("HF_HOME", os.path.join(cache, "huggingface"))
    return os.path.expanduser(os.path.join(home, "accelerate", "default_config.yaml"))


def _obstacle(text: str, launch: Launch) -> _Obstacle | None:
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
    if by_task := _emptied(launch) or _meant_for_one_task(text, launch):
        return by_task
    if chosen := _chosen_gpus(text, launch) or _hidden_options(text, launch):
        return chosen
    if left := _unreplaced(text, launch):
        return left
    if variable := _PET.search(text):
        return _Obstacle(
            f"{variable[1]}, which torchrun takes for an option",
            "write the option on the launcher's line, and remove the variable",
        )
    if GpusPerTask.is_read(text):
        return _Obstacle(
            "SLURM_GPUS_PER_TASK, which Slurm sets for --gpus-per-task only",
            "write the number in its place first",
        )
    if GpusPerTask.is_unclear(text, _texts_before(text, launch)):
        return _Obstacle(
            "--gpus-per-task, and the step has more tasks now",
            "write --gpus-per-node in its place first",
        )
    return None


def _other_starter(launch: Launch) -> str:
    """Return a word before the launcher that starts the launcher in a way that srun cannot replace,
    such as ``ssh`` or ``docker``; empty if there is none.
    """
    before = launch.texts_before
    for each in before:
        if _ELSEWHERE.fullmatch(each):
            return each
    command = next((each for each in before if not _BEFORE.fullmatch(each)), "")
    return command if _STARTS_IT.fullmatch(command) else ""


def _emptied(launch: Launch) -> _Obstacle | None:
    """Return an option before the launcher that hides the variables of srun from the ranks; None if
    there is none.
    """
    before = launch.texts_before
    for at, program in enumerate(before):
        for name, option in _EMPTIES.items():
            found = [each for each in before[at + 1 :] if option.fullmatch(each)]
            if name.fullmatch(program) and found:
                return _Obstacle(
                    f"{found[0]} of {program}, which removes the variables of srun",
                    "remove it, and unset single variables by env -u NAME",
                )
    return None


def _meant_for_one_task(text: str, launch: Launch) -> _Obstacle | None:
    """Return words before the launcher that are right only for one task on a node; None if there
    are none.
    """
    before = _texts_before(text, launch)
    for at, each in enumerate(before):
        bind = f"{each} {before[at + 1]}" if each == "--gpu-bind" and before[at + 1 :] else each
        if bind.startswith("--gpu-bind") and not _NO_GPU_BIND.fullmatch(bind):
            return _Obstacle(
                f"{bind}, with which a rank does not see all GPUs of its node",
                "remove it: as under torchrun, each rank selects its own GPU",
            )
        if _MASKS.fullmatch(each):
            return _Obstacle(
                f"{each}, written for one task on a node",
                "remove it, and add one for each rank in the script that is written",
            )
        if _PROFILERS.fullmatch(each) and not any(map(_OF_A_RANK.fullmatch, before)):
            return _Obstacle(
                f"{each}, whose file all ranks of a node would write",
                "put the rank into the file's name, such as %q{SLURM_PROCID} of nsys and ncu",
            )
    return None


def _texts_before(text: str, launch: Launch) -> list[str]:
    """Return the words before the launcher. A variable that holds options is replaced by them."""
    return with_held_options(launch.texts_before, variables(commands(text)))


def _chosen_gpus(text: str, launch: Launch) -> _Obstacle | None:
    """Return a choice of GPUs that reaches the launcher, but would not reach ranks that srun
    starts, because srun sets the variable anew; None if there is none.
    """
    before = launch.texts_before
    if any(_SRUN.fullmatch(each) for each in before):
        return None
    if chosen := next((each for each in _leading(before) if _DEVICES.fullmatch(each)), ""):
        return _Obstacle(
            f"{chosen} before {launch.launcher}, which srun sets anew",
            f"write it by env, which comes behind srun: env {chosen} {launch.launcher}",
        )
    for name, variable in variables(commands(text)).items():
        chosen = f"{name}={variable.value}"
        if _DEVICES.fullmatch(chosen):
            return _Obstacle(
                f"{chosen} in line {line_of(text, variable.word)}, which srun sets anew",
                "remove it if these are all GPUs of the job; else move it to the launcher, by"
                f" env: env {chosen} {launch.launcher}",
            )
    return None


def _leading(before: Sequence[str]) -> Sequence[str]:
    """Return the words that are before srun in the new command, if the old command has no srun.

    Args:
        before: The words before the launcher.
    """
    place = 0
    while place < len(before) and _BEFORE.fullmatch(before[place]):
        place += 1
    return before[:place]


def _hidden_options(text: str, launch: Launch) -> _Obstacle | None:
    """Return why a variable in the place of SCRIPT may hold options; None if it surely does not."""
    script = launch.script[0].text
    if not script.startswith(("$", "`")):
        return None
    names = names_in(script)
    known = variables(commands(text))
    if names and names[0] in known:
        value = known[names[0]]
        if value.value.lstrip().startswith(("-", "(")):
            line = line_of(text, value.word)
            return _Obstacle(
                f"{script} before the script, set to options in line {line}",
                f"write the options of line {line} out on this line",
            )
    if _may_hide_options(launch, is_known=bool(names and names[0] in known)):
        return _Obstacle(
            f"{script} before the script may hold options", "write the options out on this line"
        )
    return None


def _may_hide_options(launch: Launch, *, is_known: bool) -> bool:
    """Tell whether a variable in the place of SCRIPT may hold options, with SCRIPT after them.

    Args:
        launch: The launch.
        is_known: Whether the job script sets the variable, to something other than options.
    """
    if _IS_ONE_WORD.fullmatch(launch.script[0].source):
        return False
    if not launch.given.values.keys() & {"nnodes", "nproc-per-node", "num-processes", "num-gpus"}:
        return True
    rest = [word.text for word in launch.script[1:]]
    if any(re.fullmatch(r".*\.py|-m|--(module|n).*", each) for each in rest):
        return True
    # $A $B may be a script and its arguments, or options and a script.
    return not is_known and bool(rest) and rest[0].startswith("$") and rest[0] not in ("$@", "$*")


def _notes(text: str, launch: Launch) -> Iterator[str]:
    """Yield a note for the user on each difference that the ranks see, but that does not change the
    training.
    """
    yield from launcher_options.notes(launch.given)
    default = _default_config(text, launch)
    if launch.is_accelerate and re.search("[$`]", default):
        yield f"{default} is not read any more: if it is there, write its values as options"
    least, _, most = launch.given.values.get("nnodes", "").partition(":")
    if most and least != most:
        yield f"--nnodes={least}:{most}: the ranks are those of all nodes, and do not change"
    wrapper = next(iter(_wrapper(text, launch)), "")
    if wrapper:
        yield f"{wrapper} is started once for each rank, not once for each node"


def _wrapper(text: str, launch: Launch) -> Sequence[str]:
    """Return the words between srun with its options and the launcher, such as ``conda run`` or
    ``apptainer exec``; without srun, the words before the launcher that srun can start.
    """
    before = launch.texts_before
    srun = next((at for at, each in enumerate(before) if _SRUN.fullmatch(each)), None)
    if srun is None:
        return [each for each in before if not _BEFORE.fullmatch(each)]
    _, command = split_options(before[srun + 1 :], variables(commands(text)))
    return command


def _replacement(text: str, launch: Launch, carried: Carried) -> str:
    """Return the text that replaces the command up to SCRIPT: srun, srunddp and their options."""
    before = [word.source for word in launch.words[: launch.before]]
    step = [
        *size_options(text, launch),
        *(each for each in carried.srun if not _is_given(each, text, launch)),
    ]
    values = variables(commands(text))
    srun = next((at for at, each in enumerate(before) if _SRUN.fullmatch(each)), None)
    if srun is not None:
        made = [*before[: srun + 1], *with_size(before[srun + 1 :], step, values)]
    else:
        # Words that bash understands only at the beginning of a command stay in front of srun.
        place = len(_leading(before))
        made = [*before[:place], "srun", *step, *before[place:]]
    program = shlex.quote(carried.program) if carried.program else launch.program
    exports = [
        *(f"-u {name}" for name in _OF_A_PROCESS if name in values or _assigns(launch, name)),
        *map(_assignment, carried.env),
        *launcher_options.exports(launch.given),
    ]
    # Use the program env, not bash's export: env also works behind other words, and in a container.
    if exports:
        made += [f"\\\n    {each}" for each in ("env", *exports, program)]
    else:
        made.append(program)
    own = launcher_options.run_options(launch.given)
    options = [*own, *(each for each in carried.run if not _among(each, own))]
    made += options
    if launch.is_module:
        made.append("-m")
    return " ".join(made)


def _assigns(launch: Launch, name: str) -> bool:
    """Tell whether the command itself sets a variable in front of the launcher."""
    return any(each.startswith(f"{name}=") for each in launch.texts_before)


def _assignment(variable: str) -> str:
    name, _, value = variable.partition("=")
    return f"{name}={shlex.quote(value)}"


def _among(option: str, others: Sequence[str]) -> str:
    """Return the first of other options that has the same name as an option; empty if none has."""
    name = option.partition("=")[0]
    return next((each for each in others if each.partition("=")[0] == name), "")


def _is_given(option: str, text: str, launch: Launch) -> bool:
    """Tell whether the script itself gives an option of srun. Then the script's value wins."""
    names = {each.partition("=")[0] for each in _texts_before(text, launch)}
    return option.partition("=")[0] in names
