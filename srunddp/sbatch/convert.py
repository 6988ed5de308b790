"""``srunddp sbatch --from``: a job script whose one torchrun or accelerate command becomes srun and srunddp."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from srunddp.errors import ConfigError

# The words of bash, as far as it takes to find commands: quotes and $(...) belong to a word, and may hold line ends.
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_TOKEN = re.compile(
    rf"""(?:[ \t\r]|\\\n)+ | \#[^\n]*
    | (?P<here>(?<!<)<<-?[ \t]*(?P<quote>['"]?)(?P<end>\w+)(?P=quote)[^\n]*\n.*?^\t*(?P=end)$)
    | (?P<word>(?:\${_NESTED} | `[^`]*` | "(?:[^"\\]|\\.)*" | '[^']*' | \\. | [^\s"'`\\;&|()<>])+)
    | (?P<separator>.)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
# What starts a launcher, in words that a zero byte ends each.
_STARTS = re.compile(
    r"""(?<![^\0]) (?:[^\0]*/)? (?: torchrun | accelerate\0launch | python[\d.]*\0 (?:(?!-m\0)[^\0]*\0)* -m\0
    (?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch) )\0""",
    re.VERBOSE,
)
_LOOPS = ("for", "while", "until")
_BEFORE = re.compile(r"\w+=.*|then|do|else|exec|time|!|\{", re.DOTALL)  # what srun cannot stand before
# Options of torchrun and accelerate without a value; all others take one.
_FLAG = re.compile(
    r"standalone|m|module|no-python|virtual-local-rank|q|quiet|cpu|mps|tpu|use-.*|multi-gpu|same-network|debug"
    r"|enable-cpu-affinity|dynamo-use-.*|fsdp-activation-checkpointing|(no-)?tpu-cluster|tpu-use-.*"
)
# Those that srun and srunddp replace; the others are noted.
_REPLACED = re.compile(
    r"standalone|m|module|q|quiet|use-env|multi-gpu|same-network|nnodes|nproc-per-node|node-rank|rdzv-.*|master-.*"
    r"|max-restarts|num-processes|num-machines|machine-rank|main-process-.*"
)
# Options of srun that say how large the step is, in such words, with their values.
_SIZE = re.compile(r"(?<![^\0])(?:-[Nnc]\0?|--(?:nodes|ntasks|ntasks-per-node|cpus-per-task)[=\0])[^\0]*\0")
_Words = Sequence[re.Match[str]]


class _Launch(NamedTuple):
    """A command with torchrun or accelerate: its words before that, its options, and SCRIPT with the rest, as texts."""

    words: _Words
    before: int
    options: dict[str, str]
    script: _Words
    texts: Sequence[str]
    in_loop: bool


def convert(path: str) -> tuple[str, list[str]]:
    """The job script with its one launch replaced and every other byte as it was, and notes for the user.

    Raises:
        ConfigError: it cannot be read; it has none or several launches, or one that srun cannot replace.
    """
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        found = f"{path}: {getattr(error, 'strerror', None) or 'no text in UTF-8'}"
        raise ConfigError(found, expected="a job script", hint="correct --from") from None
    launches = [launch for words, in_loop in _commands(text) if (launch := _launch(words, in_loop))]
    lines = [text.count("\n", 0, launch.words[launch.before].start()) + 1 for launch in launches]
    if len(launches) != 1:
        in_lines = f", in lines {', '.join(map(str, lines))}" if lines else ""
        found = f"{path}: {len(launches) or 'no'} commands with torchrun or accelerate{in_lines}"
        hint = "replace those in quotes, in variables, or in several commands by hand: srun srunddp train.py"
        raise ConfigError(found, expected="one such command", hint=hint)
    (launch,), where = launches, f"{path}:{lines[0]}"
    if obstacle := _obstacle(text, launch):
        raise ConfigError(obstacle[0], expected="one command for all ranks", hint=obstacle[1], where=where)
    lost = [f"--{name}" for name in launch.options if not _REPLACED.fullmatch(name)]
    notes = [f"{where}: {', '.join(lost)}: left out; see srunddp run --help"] if lost else []
    start, script = launch.words[0].start(), launch.script[0].start()
    return f"{text[:start]}{_replacement(text, launch)} {text[script:]}", notes


def _commands(text: str) -> Iterator[tuple[_Words, bool]]:
    """The words of each command, and whether it is in a loop."""
    words: list[re.Match[str]] = []
    loops = 0
    for token in _TOKEN.finditer(text + "\n"):
        if token["word"]:
            words.append(token)
        elif words and (token["separator"] or token["here"]):
            loops += (words[0][0] in _LOOPS) - (words[0][0] == "done")
            yield words, loops > 0
            words = []


def _launch(words: _Words, in_loop: bool) -> _Launch | None:
    texts = [word[0].strip("\"'") for word in words]
    starts = _STARTS.search(joined := "".join(f"{text}\0" for text in texts))
    if not starts or texts[0] in ("echo", "printf", "which", "command", "type"):
        return None
    place, at, options = joined.count("\0", 0, starts.start()), joined.count("\0", 0, starts.end()), {}
    while at < len(texts) and texts[at].startswith("-"):
        name, equals, value = texts[at].lstrip("-").partition("=")
        name = name.replace("_", "-")
        takes_next = not (equals or _FLAG.fullmatch(name))
        options[name] = texts[at + 1] if takes_next and at + 1 < len(texts) else value
        at += 2 if takes_next else 1
    return _Launch(words, place, options, words[at:], texts[at:], in_loop) if words[at:] else None


def _obstacle(text: str, launch: _Launch) -> tuple[str, str] | None:
    """What was found, and the hint."""
    first, *rest = launch.texts
    if launch.in_loop:
        return "a launch in a loop", "put one srun srunddp in the place of the loop by hand"
    if first.startswith("$") and any(each.endswith(".py") for each in rest):
        return f"{first} before the script may hold options", "write the options out on this line"
    if "no-python" in launch.options:
        return "--no-python", "replace it by hand: srunddp runs a Python script"
    if re.search(r"^#SBATCH\s.*--gpus-per-task", text, re.MULTILINE):
        return "--gpus-per-task, of which there are more tasks now", "write --gpus-per-node in its place first"
    return None


def _replacement(text: str, launch: _Launch) -> str:
    """From the beginning of the command up to SCRIPT."""
    before = [word[0] for word in launch.words[: launch.before]]
    place = next((at for at, each in enumerate(before) if not _BEFORE.fullmatch(each)), len(before))
    if "srun" in before:
        place = before.index("srun")
        options = "".join(f"{word}\0" for word in before[place + 1 :])
        before[place:] = _SIZE.sub("", options).split("\0")[:-1]
    before[place:place] = ["srun", *_step(text, launch.options)]
    return " ".join([*before, "srunddp", *(["-m"] if {"m", "module"} & launch.options.keys() else [])])


def _step(text: str, options: dict[str, str]) -> list[str]:
    """Options of srun for as many tasks as torchrun or accelerate would start processes."""
    nodes = options.get("nnodes") or options.get("num-machines") or "1"
    nodes = "$SLURM_NNODES" if ":" in nodes else nodes
    total, each = options.get("num-processes"), options.get("nproc-per-node", "1")
    if total:
        each = _calculated(f"{total} / {nodes}")
    elif not each.isdecimal() and not each.startswith("$"):  # gpu, auto
        each = "$SLURM_GPUS_ON_NODE"
    tasks = re.search(r"^#SBATCH\s.*--n?tasks-per-node[= ]*(\d+)", text, re.MULTILINE)
    given = re.search(r"^#SBATCH\s+(?:-c|.*--cpus-per-task)", text, re.MULTILINE)
    # Slurm has shared the node's CPUs out to the tasks of the job, which often were one for each node.
    cpus = f"SLURM_CPUS_PER_TASK * {tasks[1] if tasks else 1}" if given else "SLURM_CPUS_ON_NODE"
    size = [f"--nodes={nodes}", f"--ntasks={total or _calculated(f'{nodes} * {each}')}", f"--ntasks-per-node={each}"]
    bind = ["--gpu-bind=none"] if re.search(r"^#SBATCH\s.*(gpu|-G)", text, re.MULTILINE) else []
    return [*size, f"--cpus-per-task=$(({cpus} / {each}))", "--kill-on-bad-exit=1", *bind]


def _calculated(product: str) -> str:
    """Of two numbers at once, or else by bash."""
    if found := re.fullmatch(r"(\d+) ([*/]) (\d+)", product):
        left, right = int(found[1]), int(found[3])
        return str(left * right if found[2] == "*" else left // max(right, 1))
    return f"$(({product}))"
