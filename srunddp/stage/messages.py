"""Defines the requests of a push to the node agents, and their answers.

The source of this module is sent to the nodes. Besides the standard library, it may import only
modules that are sent too.
"""

from __future__ import annotations

from dataclasses import dataclass

from srunddp.util.messages import Message


class StageMessage(Message):
    """A request of a push to a node agent, or an answer to one."""


@dataclass(frozen=True)
class Answer(StageMessage, kind="answer"):
    """The base of all answers. A plain Answer says that the request was carried out.

    Attributes:
        node: The name of the node that answers.
    """

    node: str


# Requests. One that names no other answer gets a plain Answer.


@dataclass(frozen=True)
class MarkedPlace:
    """A folder to stage, as seen from the node that runs the push.

    Attributes:
        path: Its path on the shared file system.
        mark: The result of :func:`srunddp.util.filesystem.mark`, by which a node recognizes the
            folder.
    """

    path: str
    mark: dict[str, str]


@dataclass(frozen=True)
class Look(StageMessage, kind="look"):
    """Make the job's folder, and compare what this node sees. :class:`Looked` is the answer.

    Attributes:
        places: The folders to compare.
        python: The interpreter to look for.
    """

    places: tuple[MarkedPlace, ...]
    python: str


@dataclass(frozen=True)
class LookForCopy(StageMessage, kind="look_for_copy"):
    """Find out whether an earlier push made this copy. :class:`CopyLookedFor` is the answer.

    Attributes:
        name: The copy's name in the job's folder.
    """

    name: str


@dataclass(frozen=True)
class Unpack(StageMessage, kind="unpack"):
    """Unpack an archive, if this node was sent one. :class:`Unpacked` is the answer.

    Attributes:
        name: The copy's name in the job's folder.
        sha256, links: See :class:`srunddp.stage.archive.ArchiveInfo`.
    """

    name: str
    sha256: str
    links: dict[str, str]


@dataclass(frozen=True)
class StagedPlace:
    """A staged folder, and the nodes that have a copy of it.

    Attributes:
        role: ``env``, ``project`` or ``data``.
        path: The shared path.
        name: The name of the copies in the job's folder; empty if no node has a copy.
        nodes: The names of the nodes with a copy.
    """

    role: str
    path: str
    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Finish(StageMessage, kind="finish"):
    """Save where each staged folder is, for the ranks that start later.

    Attributes:
        places: All folders of this push.
        cwd: The working directory of the push.
        start: The interpreter and the program to start if no environment was staged for the job.
    """

    places: tuple[StagedPlace, ...]
    cwd: str
    start: tuple[str, ...]


@dataclass(frozen=True)
class Clean(StageMessage, kind="clean"):
    """Remove the job's folder. :class:`Cleaned` is the answer."""


@dataclass(frozen=True)
class Leave(StageMessage, kind="leave"):
    """Remove everything, because the push has failed. There is no answer."""


# Answers.


@dataclass(frozen=True)
class Looked(Answer, kind="looked"):
    """Which places the node sees.

    Attributes:
        sees: For each place ``1`` if the node sees the same folder, else ``0``; one letter each,
            because an answer has to be short.
        python: Whether the node has the interpreter.
    """

    sees: str
    python: bool


@dataclass(frozen=True)
class CopyLookedFor(Answer, kind="copy_looked_for"):
    """Whether the node has the copy.

    Attributes:
        found: Whether the copy exists.
        free: Free bytes in the file system of the job's folder.
    """

    found: bool
    free: int


@dataclass(frozen=True)
class Unpacked(Answer, kind="unpacked"):
    """The node has unpacked the archive, or was sent none.

    Attributes:
        seconds: How long unpacking took; None if this node was sent no archive.
    """

    seconds: float | None


@dataclass(frozen=True)
class Cleaned(Answer, kind="cleaned"):
    """The node has removed the job's folder, except files that were written in a copy.

    Attributes:
        kept: How many such files there are; None if there was no folder.
    """

    kept: int | None


@dataclass(frozen=True)
class CannotDo(Answer, kind="cannot_do"):
    """The node could not carry out the request.

    Attributes:
        found, expected, hint: The parts of an error's message; the last two may be empty.
    """

    found: str
    expected: str
    hint: str
