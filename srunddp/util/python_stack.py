"""Python stacks as text, and what they tell: what each rank executes, and which rank most likely
blocks the others. A dump is the text that faulthandler writes.
"""

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
# Names of functions that say nothing about what a rank does, because they only call another one:
# decorators, and torch's calls of a module.
_WRAPPERS = ("wrapper", "inner", "_wrapped_call_impl", "_call_impl", "decorate_context", "<lambda>")
_WAITING = (
    "torch/distributed/",
    "torch/autograd/graph.py",
    "torch/cuda/",
    "torch/nn/parallel/distributed.py",
)
_SAVING = ("torch/serialization.py", "safetensors/", "numpy/lib/")


def main_stack(text: str) -> Stack:
    """Return the stack of the thread that handled the signal for a dump, or that has crashed; an
    empty tuple if the dump has none.

    After a crash, faulthandler calls the thread that has crashed the current thread, and writes an
    empty line after its stack.

    Args:
        text: The dump.
    """
    headings = list(_HEADING.finditer(text))
    if not headings:
        return ()
    stack, _, _ = text[headings[-1].end() :].partition("\n\n")
    return tuple(_FRAME.finditer(stack))


def top_frame(stack: Stack) -> str:
    """Return the innermost frame that is no wrapper, as ``function (file.py:12)``; ``no stack`` for
    an empty stack. If all frames are wrappers, it is the innermost one.
    """
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
    """Turn lines that :func:`format_stack` has returned back into a dump that :func:`main_stack`
    can read; empty if the lines are not those of a stack.
    """
    frames = [match for match in map(_PRINTED.fullmatch, lines) if match]
    if not frames:
        return ""
    dumped = [frame.expand(r'  File "\g<file>", line \g<line> in \g<function>') for frame in frames]
    return "\n".join(["Stack (most recent call first):", *reversed(dumped)])


def is_saving(stack: Stack) -> bool:
    """Return whether a rank with this stack is probably saving: one of the four innermost frames is
    in a module that writes files. Such a module may compute a checksum for seconds before it writes
    anything.
    """
    return any(part in frame["file"] for frame in stack[:4] for part in _SAVING)


def is_waiting(stack: Stack) -> bool:
    """Return whether a rank with this stack probably waits for other ranks or for a GPU: one of the
    four innermost frames is in a module of torch whose functions wait.
    """
    return any(part in frame["file"] for frame in stack[:4] for part in _WAITING)


def groups(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks grouped by the innermost frame of their stacks (see :func:`top_frame`), with
    the largest group first.

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
    stack. Of the candidates with the fewest steps, the one in the smallest of :func:`groups` is
    returned, or the lowest rank of several. If there are no candidates, because all ranks wait, a
    rank of the smallest group is returned; the steps only decide between ranks of equal groups.

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
    # Compare the groups first: a rank that has left out a collective may have made more steps than
    # the others, and waits in another place than they do.
    return min(found, key=lambda rank: (sizes[rank], steps.get(rank, 0), rank))
