"""What a push asks the node agents, and what they answer.

This module is sent to the nodes: besides the standard library it imports only what is sent, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from srunddp.util.messages import Message


class StageMessage(Message):
    """What a push and the node agents tell each other."""


@dataclass(frozen=True)
class Answer(StageMessage, kind="answer"):
    """What every answer of a node has; by itself it says that the request was carried out.

    Attributes:
        node: The name of the node that answers.
    """

    node: str


# Requests; those without another answer are answered by :class:`Answer`.


@dataclass(frozen=True)
class MarkedPlace:
    """A folder as it is where it is packed.

    Attributes:
        path: Its path.
        mark: Of :func:`srunddp.util.filesystem.mark`.
    """

    path: str
    mark: dict[str, str]


@dataclass(frozen=True)
class Look(StageMessage, kind="look"):
    """Make the job's folder, and look what the node sees. :class:`Looked` is the answer.

    Attributes:
        places: The folders to compare.
        python: The interpreter to look for.
    """

    places: tuple[MarkedPlace, ...]
    python: str


@dataclass(frozen=True)
class LookForCopy(StageMessage, kind="look_for_copy"):
    """Look for a copy from an earlier push. :class:`CopyLookedFor` is the answer.

    Attributes:
        name: Of the copy, in the job's folder.
    """

    name: str


@dataclass(frozen=True)
class Unpack(StageMessage, kind="unpack"):
    """Unpack an archive, if it was sent to this node. :class:`Unpacked` is the answer.

    Attributes:
        name: Of the copy, in the job's folder.
        sha256, links: As of :class:`srunddp.stage.archive.ArchiveInfo`.
    """

    name: str
    sha256: str
    links: dict[str, str]


@dataclass(frozen=True)
class StagedPlace:
    """A folder, and the nodes that have a copy of it.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: Where it was packed.
        name: Of the copies, in the job's folder.
        nodes: That have one.
    """

    role: str
    path: str
    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Finish(StageMessage, kind="finish"):
    """Write down where everything is, for the ranks that are to start.

    Attributes:
        places: All that was staged.
        cwd: The working directory of the push.
        start: The words that start srunddp where no environment is among the places.
    """

    places: tuple[StagedPlace, ...]
    cwd: str
    start: tuple[str, ...]


@dataclass(frozen=True)
class Clean(StageMessage, kind="clean"):
    """Remove the job's folder. :class:`Cleaned` is the answer."""


@dataclass(frozen=True)
class Leave(StageMessage, kind="leave"):
    """The push has failed: remove everything. There is no answer."""


# Answers.


@dataclass(frozen=True)
class Looked(Answer, kind="looked"):
    """What the node sees.

    Attributes:
        sees: For each place, whether it is the same here: ``1`` or ``0``, as lines are to be short.
        python: Whether the interpreter is there.
    """

    sees: str
    python: bool


@dataclass(frozen=True)
class CopyLookedFor(Answer, kind="copy_looked_for"):
    """Whether the copy is there.

    Attributes:
        found: Whether it is.
        free: Bytes that are free in the file system of the job's folder.
    """

    found: bool
    free: int


@dataclass(frozen=True)
class Unpacked(Answer, kind="unpacked"):
    """What came of unpacking.

    Attributes:
        seconds: What it took; None where nothing was sent to this node.
    """

    seconds: float | None


@dataclass(frozen=True)
class Cleaned(Answer, kind="cleaned"):
    """What was removed.

    Attributes:
        kept: How many files stay, as they were written in a copy; None where there was no folder.
    """

    kept: int | None


@dataclass(frozen=True)
class CannotDo(Answer, kind="cannot_do"):
    """The node could not do it.

    Attributes:
        found, expected, hint: As of an error.
    """

    found: str
    expected: str
    hint: str
