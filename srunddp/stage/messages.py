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


# Requests. A request whose docstring names no class of answer gets a plain Answer.


@dataclass(frozen=True)
class MarkedPlace:
    """A folder to stage, as seen from the node that runs the push.

    Attributes:
        path: The folder's absolute path.
        mark: The result of :func:`srunddp.util.filesystem.mark`, by which a node recognizes the
            folder.
    """

    path: str
    mark: dict[str, str]


@dataclass(frozen=True)
class Look(StageMessage, kind="look"):
    """Make the job's folder, and find out which folders this node sees. :class:`Looked` is the
    answer.

    Attributes:
        places: The folders to look for.
        python: The path of the interpreter to look for.
    """

    places: tuple[MarkedPlace, ...]
    python: str


@dataclass(frozen=True)
class LookForCopy(StageMessage, kind="look_for_copy"):
    """Find out whether the node has this copy from an earlier push. :class:`CopyLookedFor` is the
    answer.

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
        role: What the folder contains: ``env``, ``project`` or ``data``.
        path: The folder's absolute path on the node that runs the push.
        name: The name of the copies in the job's folder; empty if no node has a copy.
        nodes: The names of the nodes with a copy.
    """

    role: str
    path: str
    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Finish(StageMessage, kind="finish"):
    """Write down where each staged folder is, and write the program that srun starts for each rank.

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
    """End, because the push has failed. There is no answer. The node's agent removes the job's
    folder first, unless the agent of an earlier push keeps the folder.
    """


# Answers to the requests above.


@dataclass(frozen=True)
class Looked(Answer, kind="looked"):
    """Which folders the node sees.

    Attributes:
        sees: One character for each folder, in the order of the request: ``1`` if the node sees the
            same folder, else ``0``. It is so short because an answer has to fit into one line of
            srun's output.
        python: Whether the node has the interpreter, and may execute it.
    """

    sees: str
    python: bool


@dataclass(frozen=True)
class CopyLookedFor(Answer, kind="copy_looked_for"):
    """Whether the node has the copy, and room for one.

    Attributes:
        found: Whether the copy exists.
        free: The number of free bytes in the file system of the job's folder.
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
        kept: The number of files that stay; None if the node had no folder of the job.
    """

    kept: int | None


@dataclass(frozen=True)
class CannotDo(Answer, kind="cannot_do"):
    """The node could not carry out the request.

    Attributes:
        found, expected, hint: The parts of the error message; ``expected`` and ``hint`` may be
            empty.
    """

    found: str
    expected: str
    hint: str
