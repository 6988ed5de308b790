"""``srunddp sbatch --from``: a job script whose one torchrun or accelerate command becomes srun and
srunddp.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from srunddp.errors import ConfigError
from srunddp.util.usage_errors import foreign

# The words of bash, as far as it takes to find commands. Quotes, $(...) and an array's values
# belong to a word, and may hold line ends.
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_TOKEN = re.compile(
    rf"""(?:[ \t\r]|\\\n)+ | \#[^\n]*
    | (?P<here>
        (?<!<)<<-?[ \t]*(?P<quote>['"]?)\\?(?P<end>[\w.-]+)(?P=quote)[^\n]*\n.*?^\t*(?P=end)$
      )
    | (?P<word>
        (?:
          (?:\$|(?<==)){_NESTED}
          | `[^`]*`
          | "(?:[^"\\]|\\.)*"
          | '[^']*'
          | \\.
          | [^\s"'`\\;&|()<>]
        )+
      )
    | (?P<separator>.)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_NAMED = re.compile(r"[^#]*(torchrun|torch\.distributed\.(run|launch)|accelerate launch)")
# What starts a launcher, in words that a zero byte ends each.
_STARTS = re.compile(
    r"""(?<![^\0]) (?:[^\0]*/)?
    (?:
      torchrun
      | accelerate\0launch
      | python[\d.]*\0 (?:(?!-m\0)[^\0]*\0)* -m\0
        (?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch)
    )\0""",
    re.VERBOSE,
)
_BEFORE_LOOPS = ("then", "do", "else", "{", "time")
_LOOPS = ("for", "while", "until")
# What srun cannot stand before.
_BEFORE = re.compile(r"\w+=.*|if|elif|then|do|else|exec|time|!|\{", re.DOTALL)
# srun cannot, or it may be srun.
_STARTS_IT = re.compile(r"\$.*|(.*/)?(eval|ssh|pdsh|clush|coproc|mpi(run|exec).*)")
# What starts it several times, or without the variables that tell a rank.
_ELSEWHERE = re.compile(r"(.*/)?(docker|podman|xargs|parallel)|--(cleanenv|containall)")
_SRUN = re.compile(r"(.*/)?srun")
# Options of torchrun and accelerate without a value; all others take one.
_FLAG = re.compile(
    r"standalone|m|module|no-python|virtual-local-rank|run-path|q|quiet|cpu|mps|tpu|use-.*|multi-gpu|same-network|debug"
    r"|enable-cpu-affinity|dynamo-use-.*|downcast-bf16|fp8-use-.*|(no-)?tpu-cluster|tpu-use-.*"
)
_SAME = ("m", "module", "q", "quiet", "use-env")  # for srunddp, too, or of no use
# Options of srun that say how large the step is.
_SIZE = re.compile(r"-[Nnc].*|--(?:nodes|n?tasks(?:-per-node)?|cpus-per-task)(?:=.*)?", re.DOTALL)


_Words = Sequence[re.Match[str]]


class _Launch(NamedTuple):
    """A command with torchrun or accelerate: its words, how many are before that, its options,
    SCRIPT with the rest.
    """

    words: _Words
    before: int
    launcher: str
    options: dict[str, str]
    script: _Words
    in_loop: bool


def convert(path: str) -> tuple[str, list[str]]:
    """The job script with its one launch replaced and every other byte as it was, and notes for the
    user.

    A ConfigError where it cannot be read, has none or several launches, or one that srun cannot
    replace.
    """
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: {getattr(error, 'strerror', None) or 'no text in UTF-8'}",
            expected="a job script",
            hint="correct --from",
        ) from None
    launches = [launch for words, in_loop in _commands(text) if (launch := _launch(words, in_loop))]
    lines = [text.count("\n", 0, launch.words[launch.before].start()) + 1 for launch in launches]
    quoted = [number for number, line in enumerate(text.splitlines(), 1) if _NAMED.match(line)]
    if len(launches) != 1:
        found = f"{path}: {len(launches) or 'no'} commands with torchrun or accelerate"
        if quoted and not lines:
            found += ", but in quotes or the like"
        found += "".join(f", line {number}" for number in lines or quoted)
        raise ConfigError(
            found,
            expected="one such command",
            hint=(
                "replace those in quotes, in variables, or in several commands by hand: srun"
                " srunddp train.py"
            ),
        )
    (launch,) = launches
    where = f"{path}:{lines[0]}"
    if obstacle := _obstacle(text, launch):
        raise ConfigError(
            obstacle[0], expected="one command for all ranks", hint=obstacle[1], where=where
        )
    notes = [f"{where}: {each}" for each in _left_out(launch.options)]
    if launch.launcher.endswith("torch.distributed.launch") and "use-env" not in launch.options:
        notes.append(f"{where}: no --local-rank is passed; the script is to read LOCAL_RANK")
    others = (number for number in quoted if number != lines[0])
    notes += [
        f"{path}:{number}: torchrun or accelerate, too; this line is left as it is"
        for number in others
    ]
    start = launch.words[0].start()
    script = launch.script[0].start()
    return f"{text[:start]}{_replacement(text, launch)} {text[script:]}", notes


def _commands(text: str) -> Iterator[tuple[_Words, bool]]:
    """The words of each command, and whether it is in a loop."""
    words: list[re.Match[str]] = []
    loops = 0
    for token in _TOKEN.finditer(text + "\n"):
        if token["word"]:
            words.append(token)
        elif words and (token["separator"] or token["here"]):
            first = next((word[0] for word in words if word[0] not in _BEFORE_LOOPS), "")
            if first in _LOOPS:
                loops += 1
            elif first == "done":
                loops -= 1
            yield words, loops > 0
            words = []


def _launch(words: _Words, in_loop: bool) -> _Launch | None:
    texts = _texts(words)
    joined = "".join(f"{text}\0" for text in texts)
    starts = _STARTS.search(joined)
    if not starts or texts[0] in ("echo", "printf", "which", "command", "type"):
        return None
    place = joined.count("\0", 0, starts.start())
    at = joined.count("\0", 0, starts.end())
    options = {}
    while at < len(texts) and texts[at].startswith("-") and texts[at] != "--":
        name, equals, value = texts[at].lstrip("-").partition("=")
        name = {"r": "redirects", "t": "tee"}.get(name, name.replace("_", "-"))
        takes_next = not (equals or _FLAG.fullmatch(name))
        if takes_next and at + 1 < len(texts):
            options[name] = texts[at + 1]
        else:
            options[name] = value
        if takes_next:
            at += 2
        else:
            at += 1
    named = starts[0].replace("\0", " ").strip()
    if at < len(texts) and texts[at] == "--":
        at += 1
    rest = words[at:]
    if rest:
        return _Launch(words, place, named, options, rest, in_loop)
    return None


def _texts(words: _Words) -> list[str]:
    return [re.sub("[\"']", "", word[0]) for word in words]


def _obstacle(text: str, launch: _Launch) -> tuple[str, str] | None:
    """What was found, and the hint."""
    first, *rest = _texts(launch.script)
    before = _texts(launch.words[: launch.before])
    command = next((each for each in before if not _BEFORE.fullmatch(each)), "")
    if launch.in_loop:
        return (
            "a launch in a loop",
            "replace a loop over nodes by one srun srunddp; in another loop edit this line",
        )
    if wrong := next(
        filter(_ELSEWHERE.fullmatch, before), _STARTS_IT.fullmatch(command) and command
    ):
        return (
            f"{wrong} before {launch.launcher}",
            "write this line by hand, so that srun starts the ranks",
        )
    sized = launch.options.keys() & {"nnodes", "nproc-per-node", "num-processes"}
    suspect = not sized or any(re.fullmatch(r".*\.py|-m|--(module|n).*", each) for each in rest)
    if suspect and first.startswith(("$", "`")):
        return f"{first} before the script may hold options", "write the options out on this line"
    if "accelerate" in launch.launcher and "num-processes" not in launch.options:
        return (
            f"{launch.launcher} without --num_processes",
            "add it, and --num_machines, with accelerate's own numbers",
        )
    if "no-python" in launch.options:
        return "--no-python", "replace it by hand: srunddp runs a Python script"
    if re.search(
        r"^#SBATCH\s.*--gpus-per-task", text, re.MULTILINE
    ) or "--gpus-per-task" in " ".join(before):
        return (
            "--gpus-per-task, of which there are more tasks now",
            "write --gpus-per-node in its place first",
        )
    return None


def _left_out(options: dict[str, str]) -> Iterator[str]:
    """A note for each option that neither srun nor srunddp replaces."""
    for name, value in options.items():
        answer = (foreign(f"--{name}") or ("", "see srunddp run --help"))[1]
        if (
            name not in _SAME
            and value != "0"
            and not answer.startswith(("leave it out", "srun's --n"))
        ):
            yield f"--{name} is left out; here: {answer}"


def _replacement(text: str, launch: _Launch) -> str:
    """From the beginning of the command up to SCRIPT."""
    before = [word[0] for word in launch.words[: launch.before]]
    place = next((at for at, each in enumerate(before) if not _BEFORE.fullmatch(each)), len(before))
    if srun := next(filter(_SRUN.fullmatch, before), ""):
        place = before.index(srun)
        before[place:] = _without_size(before[place + 1 :])
    before[place:place] = [srun or "srun", *_step(text, launch.options)]
    return " ".join(
        [*before, "srunddp", *(["-m"] if {"m", "module"} & launch.options.keys() else [])]
    )


def _without_size(words: Sequence[str]) -> Iterator[str]:
    """The words after srun, without options of the step's size; its command begins behind a word
    that is no option.
    """
    left = list(words)
    while left and left[0].startswith("-"):
        option = [left.pop(0)]
        if re.fullmatch(r"-\w|--[\w-]+", option[0]) and left and not left[0].startswith("-"):
            option.append(left.pop(0))  # which may be its value
        yield from () if _SIZE.fullmatch(option[0]) else option
    yield from left


def _step(text: str, options: dict[str, str]) -> list[str]:
    """Options of srun for as many tasks as torchrun or accelerate would start processes."""
    nodes = options.get("nnodes") or options.get("num-machines") or "1"
    nodes = "$SLURM_NNODES" if ":" in nodes else nodes
    total = options.get("num-processes")
    each = options.get("nproc-per-node", "1")
    if total:
        each = _calculated(f"{total} / {nodes}")
    elif not each.isdecimal() and not each.startswith(("$", "`")):  # cpu, gpu, auto
        each = "$SLURM_CPUS_ON_NODE" if each == "cpu" else "$SLURM_GPUS_ON_NODE"
    size = {
        "nodes": nodes,
        "ntasks": total or _calculated(f"{nodes} * {each}"),
        "ntasks-per-node": each,
    }
    # Slurm has shared the node's CPUs out to the tasks of the job, which often were one for each
    # node.
    size["cpus-per-task"] = _calculated(f"$SLURM_CPUS_ON_NODE / {each}")
    words = [
        f'--{name}="{value}"' if re.search("[$`]", value) else f"--{name}={value}"
        for name, value in size.items()
    ]
    if re.search(r"^#SBATCH\s.*(gpu|-G)", text, re.MULTILINE):
        bind = ["--gpu-bind=none"]
    else:
        bind = []
    return [*words, "--kill-on-bad-exit=1", *bind]


def _calculated(product: str) -> str:
    """Of two numbers at once, or else by bash."""
    if found := re.fullmatch(r"(\d+) ([*/]) (\d+)", product):
        left = int(found[1])
        right = int(found[3])
        return str(left * right if found[2] == "*" else left // max(right, 1))
    if not re.search(r"[$][(]|`", product):
        product = re.sub("[$](?=[A-Za-z_])", "", product)
    return f"$(({product}))"
