"""The size of the world by what was asked for: nodes times ranks on each, as options and headers tell them."""

from __future__ import annotations

import re

_NODES = re.compile(
    r"(?:--nodes|--nnodes|--num[-_]nodes|\s-N)[ =]?(\d{1,5})(?![\d:-])|nnodes=(\d{1,5}), num_local_procs"
)
_EACH = re.compile(
    r"(?:--ntasks-per-node|--nproc[-_]per[-_]node|--num[-_]gpus|--npernode)[ =](\d{1,4})\b|num_local_procs=(\d{1,4})\b"
)
_TASKS = re.compile(r"#SBATCH (?:--ntasks|-n)[ =]?(\d{1,6})\b")
_ANY_NODES = re.compile(r"--n?nodes|--num[-_]nodes")
_PER_NODE = re.compile(r"\bSLURM_(?:STEP_)?TASKS_PER_NODE[=:] ?'?((?:\d+(?:\(x\d+\))?,?)+)")
_DEEPSPEED = re.compile(r"WORLD INFO DICT: \{(.*)\}")
_STARTERS = ("torchrun", "torch.distributed", "deepspeed", "num_local_procs")
WORDS = (*_STARTERS, "#SBATCH", "srun ", "TASKS_PER_NODE", "WORLD INFO")


class Shapes:
    """What headers tell, line by line."""

    def __init__(self) -> None:
        self._header: dict[str, int] = {}

    def size(self, text: str) -> tuple[int, bool]:
        """World size that a line tells, 0 if none, and whether it is that of the ranks themselves."""
        if match := _PER_NODE.search(text):
            return sum(
                int(each) * int(times or 1) for each, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", match[1])
            ), False
        if match := _DEEPSPEED.search(text):
            return sum(len(re.findall(r"\d+", each)) for each in re.findall(r"\[([^\]]*)\]", match[1])), True
        own = next((word for word in _STARTERS if word in text), "")
        if own and own != _STARTERS[-1]:  # srun's options before it are of what it starts
            text = text[text.index(own) :]
        nodes, each = _number(_NODES, text), _number(_EACH, text)
        if own:
            return (each * (nodes or (0 if _ANY_NODES.search(text) else 1))), True
        if "#SBATCH" in text:
            found = {"nodes": nodes, "each": each, "tasks": _number(_TASKS, text)}
            self._header |= {name: value for name, value in found.items() if value}
            nodes, each = self._header.get("nodes", 1), self._header.get("each", 0)
            if "tasks" in self._header:
                return self._header["tasks"], False
        # One task on each node mostly starts the ranks itself.
        return (nodes * each if each > 1 else 0), False


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(next(filter(None, match.groups()), 0)) if match else 0
