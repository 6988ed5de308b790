"""Replaces ``--gpus-per-task`` in the head of a job script by ``--gpus-per-node``, because with one
task for each GPU ``--gpus-per-task`` would mean a different number of GPUs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_WRITTEN = re.compile(
    r"^(?P<before>#SBATCH\s[^\n]*?)(?P<written>--gpus-per-task(?:=|[ \t]+)"
    r"(?P<type>[\w.-]+:)?(?P<number>\d+))(?=\s|$)",
    re.MULTILINE,
)
_ANY = re.compile(r"--gpus-per-task|--tres-per-task[ =]\S*gpu")
_HEAD = re.compile(r"^#SBATCH\s.*", re.MULTILINE)


@dataclass(frozen=True)
class GpusPerTask:
    """The option ``--gpus-per-task`` in a script, and its replacement.

    Attributes:
        line: The number of the option's line, from 1.
        written: The option with its value, as the script has it.
        replacement: ``--gpus-per-node`` with the same number of GPUs.
    """

    line: int
    written: str
    replacement: str

    @classmethod
    def of(cls, text: str) -> "GpusPerTask | None":
        """Find the option in the head of a script.

        Args:
            text: The script.

        Returns:
            None if the option is missing, or if the head does not tell how many tasks a node has.
        """
        found = _WRITTEN.search(text)
        tasks = _tasks_per_node(text)
        if not found or not tasks:
            return None
        gpus = tasks * int(found["number"])
        return cls(
            line=text.count("\n", 0, found.start()) + 1,
            written=found["written"],
            replacement=f"--gpus-per-node={found['type'] or ''}{gpus}",
        )

    @classmethod
    def is_unclear(cls, text: str, before: Sequence[str]) -> bool:
        """Tell whether a script has the option, but it cannot be replaced.

        Args:
            text: The script.
            before: The words before the launcher, where srun may have the option.
        """
        if _ANY.search(" ".join(before)):
            return True
        in_head = _ANY.findall(" ".join(_HEAD.findall(text)))
        return bool(in_head) and (len(in_head) > 1 or cls.of(text) is None)

    @classmethod
    def is_read(cls, text: str) -> bool:
        """Tell whether a script reads the option's variable, which Slurm does not set without the
        option.
        """
        return "SLURM_GPUS_PER_TASK" in text

    def replaced(self, text: str) -> str:
        """Return a script with the replacement in place of the option."""
        return _WRITTEN.sub(lambda found: found["before"] + self.replacement, text, count=1)


def _tasks_per_node(text: str) -> int:
    """Return how many tasks the head of a script asks for on each node; 0 if that is not clear."""
    head = " ".join(_HEAD.findall(text))
    per_node = _number(head, r"--n?tasks-per-node")
    if per_node:
        return per_node
    tasks = _number(head, r"--ntasks|-n")
    nodes = _number(head, r"--nodes|-N")
    if tasks and nodes and tasks % nodes == 0:
        return tasks // nodes
    return 0


def _number(head: str, names: str) -> int:
    found = re.search(rf"(?<!\S)(?:{names})(?:=|\s*)(\d+)(?!\S)", head)
    return int(found[1]) if found else 0
