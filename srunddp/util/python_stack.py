"""Python stacks as text: where each rank is, and which rank most likely blocks the others."""

import os
import re
from collections.abc import Mapping, Sequence

from srunddp.util.hostlist import group_by_key

Stack = tuple[re.Match[str], ...]  # the lines of a stack, the innermost frame first
_FRAME = re.compile(
    r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE
)
_PRINTED = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.+)')
_HEADING = re.compile(
    r"^(?:Stack|Current thread [^\n]*) \(most recent call first\):$", re.MULTILINE
)
# Functions that say nothing about where a rank is: decorators, and torch's calls of a module.
_WRAPPERS = ("wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "<lambda>")
_WAITING = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/cuda/",
    "torch/nn/parallel/distributed.py",
)
_SAVING = ("torch/serialization.py", "safetensors/", "numpy/lib/")


def main_stack(text: str) -> Stack:
    """Return the stack of the thread that took the signal, or that has crashed; empty for none.

    For a crash, faulthandler calls it the current thread and writes an empty line after its stack.
    """
    headings = list(_HEADING.finditer(text))
    if not headings:
        return ()
    stack, _, _ = text[headings[-1].end() :].partition("\n\n")
    return tuple(_FRAME.finditer(stack))


def top_frame(stack: Stack) -> str:
    """Return the innermost frame that is no wrapper, as ``function (file.py:12)``."""
    for frame in (*(each for each in stack if each["function"] not in _WRAPPERS), *stack):
        return f"{frame['function']} ({os.path.basename(frame['file'])}:{frame['line']})"
    return "no stack"


def format_stack(stack: Stack) -> str:
    """Return a stack as Python prints it, with the outermost frame first; empty for none."""
    lines = [
        frame.expand(r'  File "\g<file>", line \g<line>, in \g<function>')
        for frame in reversed(stack)
    ]
    if stack:
        return "\n".join(["Stack (most recent call last):", *lines])
    return ""


def dump_of_printed(lines: Sequence[str]) -> str:
    """Return the dump of a stack whose lines :func:`format_stack` has returned; empty if the lines
    are not a stack.
    """
    frames = [match for match in map(_PRINTED.fullmatch, lines) if match]
    if not frames:
        return ""
    dumped = [frame.expand(r'  File "\g<file>", line \g<line> in \g<function>') for frame in frames]
    return "\n".join(["Stack (most recent call first):", *reversed(dumped)])


def is_saving(stack: Stack) -> bool:
    """Return whether a rank with this stack writes a file: one of the four innermost frames is in a
    module that does so. It may compute a checksum for seconds before it writes.
    """
    return any(part in frame["file"] for frame in stack[:4] for part in _SAVING)


def is_waiting(stack: Stack) -> bool:
    """Return whether a rank with this stack waits for other ranks or for a GPU: one of the four
    innermost frames is in a module of torch that does so.
    """
    return any(part in frame["file"] for frame in stack[:4] for part in _WAITING)


def groups(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Group the ranks by the place where they are, with the largest group first.

    Args:
        texts: The dump of each rank.
    """
    found = group_by_key(
        (top_frame(main_stack(text)), rank) for rank, text in sorted(texts.items())
    )
    return dict(sorted(found.items(), key=lambda each: -len(each[1])))


def find_blocking_rank(texts: Mapping[int, str], steps: Mapping[int, int]) -> int:
    """Return the rank that the others most likely wait for.

    Candidates are the ranks whose stack shows no wait; if there are none, the ranks without a
    stack. Among those with the fewest steps, the one in the smallest group at one place is
    returned; of several, the lowest rank. If all ranks wait, the group counts before the steps.

    Args:
        texts: The dump of each rank.
        steps: How many steps each rank has made; 0 for a rank that is missing.
    """
    found = {rank: main_stack(text) for rank, text in sorted(texts.items())}
    elsewhere = [rank for rank, stack in found.items() if stack and not is_waiting(stack)]
    unknown = [rank for rank, stack in found.items() if not stack]
    candidates = elsewhere or unknown
    sizes = {rank: len(ranks) for ranks in groups(texts).values() for rank in ranks}
    if candidates:
        return min(candidates, key=lambda rank: (steps.get(rank, 0), sizes[rank], rank))
    # A rank that has left out a collective is ahead of the others, and waits where they are not.
    return min(found, key=lambda rank: (sizes[rank], steps.get(rank, 0), rank))
