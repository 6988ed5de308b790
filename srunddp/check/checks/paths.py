"""Check that the working directory, the script, the environment and the paths named with --path
exist on every rank, and are the same there.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

from srunddp.check.finding import (
    FAIL,
    WARN,
    Check,
    CheckContext,
    Finding,
    Ranks,
    Severity,
    call_in_daemon_thread,
)
from srunddp.util.filesystem import Place, content, look, why_not_writable

_PATIENCE = 5.0  # seconds for all paths together
PROJECT = "working directory"
SCRIPT = "script"
ENVIRONMENT = "environment"
NAMED = "path"
_SHARE = "move it to a shared file system, copy it there, or name another"


@dataclass(frozen=True, kw_only=True)
class PathFacts:
    """The files and folders that one rank sees at the paths. All ranks have the same roles, in the
    same order.
    """

    places: list[Place]


def collect(context: CheckContext) -> PathFacts:
    """Look at the paths from this rank. Only local rank 0 of each node reads contents, and only
    rank 0 writes a file.
    """
    if context.script:
        script = [(SCRIPT, context.script)]
    else:
        script = []
    named = [
        (PROJECT, "."),
        *script,
        (ENVIRONMENT, sys.prefix),
        *((NAMED, path) for path in context.paths),
    ]
    # Begin with the kind "silent", which a place keeps if its file server does not answer in time.
    places = [
        Place(role=role, path=path, kind="silent", error="", system="", identity="", content="")
        for role, path in named
    ]
    looking = [call_in_daemon_thread(partial(_look, place, context)) for place in places]
    for each in wait(looking, _PATIENCE).done:
        # result() raises an error of the look here, so the report shows it as an error of this
        # check and not as silence.
        each.result()
    places = [place.copy() for place in places]  # a thread may still be changing the originals
    # Show shared paths, because the copies of one folder have different paths on different nodes.
    if staged := context.staged:
        places = [Place(**{**place, "path": staged.shared(place["path"])}) for place in places]
    return PathFacts(places=places)


def _look(place: Place, context: CheckContext) -> None:
    """Look at a place, and store each result in ``place`` at once, so that the results remain if a
    later look hangs.
    """
    role = place["role"]
    path = place["path"]
    local_rank = context.environment.local_rank
    place.update(look(role, path, write=role == PROJECT))
    if (
        context.environment.rank == 0
        and role == PROJECT
        and place["kind"] == "folder"
        and not place["error"]
    ):
        place["error"] = "cannot be written to: no answer"
        why = why_not_writable(path)
        if why:
            place["error"] = f"cannot be written to: {why}"
        else:
            place["error"] = ""
    # The staged copy of the project lacks excluded files, and files that were written after the
    # push. So its content is not compared.
    if local_rank == 0 and role not in (
        (ENVIRONMENT, PROJECT) if context.staged else (ENVIRONMENT,)
    ):
        place["content"] = content(path, whole=role == SCRIPT)


def evaluate(seen: Ranks[PathFacts]) -> Iterator[Finding]:
    """Judge the paths: one that is missing or unreadable is a failure, and so is a script that
    differs between nodes. Most other differences are warnings.
    """
    for index in range(min(len(one.facts.places) for one in seen)):
        for one in seen:
            place = one.facts.places[index]
            level, found, hint = _wrong(place, one.node == seen[0].node)
            if found:
                folder = _is_there(place) and place["role"] == PROJECT
                if folder:
                    expected = "a folder that can be written to"
                else:
                    expected = "on every rank"
                yield one.finding(level, f"{_named(place)}{found}", expected, hint, rank=True)
        yield from _differing(seen, index)


def _is_there(place: Place) -> bool:
    return place["kind"] not in ("missing", "silent", "broken")


def _named(place: Place) -> str:
    if place["role"] == NAMED:
        return place["path"]
    return f"the {place['role']} {place['path']}"


def _wrong(place: Place, main: bool) -> tuple[Severity, str, str]:
    """Return the severity of what is wrong with a place, what is wrong, and a hint.

    Args:
        place: The place.
        main: Whether the place is on rank 0's node.

    Returns:
        The second value, what is wrong, is empty if nothing is wrong.
    """
    match place["kind"]:
        case "missing":
            return FAIL, " is not there", _SHARE
        case "silent":
            hint = "see whether its file server runs (df, dmesg), or leave the node out"
            return FAIL, f" does not answer within {_PATIENCE:g} s", hint
        case "broken":
            return FAIL, f": {place['error']}", "have the node's mount looked at"
    if place["error"].startswith("cannot be written"):
        hint = "start in a folder of your own with room in it: logs and checkpoints go there"
        return FAIL if main else WARN, f" {place['error']}", hint
    return FAIL, f" {place['error']}" if place["error"] else "", "correct its permissions"


def _differing(seen: Ranks[PathFacts], index: int) -> Iterator[Finding]:
    """Name the ranks where a path differs from the same path on most ranks."""
    seen = seen.where(lambda one: _is_there(one.facts.places[index]))
    if not seen:
        return
    places = {one.rank: one.facts.places[index] for one in seen}
    role = places[seen[0].rank]["role"]
    if role == PROJECT:
        title = "the working directory is"
        hint = "move the folder to a shared file system: Slurm starts in /tmp where it is missing"
        seen = yield from seen.differing(
            lambda one: places[one.rank]["path"], WARN, title, hint, ranks=False
        )
    usual, others = seen.minority(lambda one: places[one.rank]["kind"])
    for kind, who in others.items():
        found = f"{_named(places[who[0].rank])} is a {kind}"
        expected = f"a {usual}, as on most ranks"
        yield who.finding(FAIL, found, expected, _SHARE, ranks=False)
    # A log may grow between the looks of two ranks. Ranks that see a folder with the same identity
    # see one folder, so this is no difference.
    read = seen.where(lambda one: places[one.rank]["content"] and places[one.rank]["kind"] == usual)
    # Go through the ranks in reverse order, so that the dict keeps the content that the lowest rank
    # has read for each identity.
    first = {places[one.rank]["identity"]: places[one.rank]["content"] for one in reversed(read)}
    for who in read.minority(lambda one: first[places[one.rank]["identity"]])[1].values():
        if usual == "folder":
            expected = "the same names and sizes"
        else:
            expected = "the same content"
        found = f"{_named(places[who[0].rank])} differs from that of most nodes"
        yield who.finding(FAIL if role == SCRIPT else WARN, found, expected, _SHARE, ranks=False)


def summary(seen: Ranks[PathFacts]) -> str:
    """Name the file system of each path, as rank 0 sees it."""
    named = [
        (each["path"] if each["role"] == NAMED else each["role"], each)
        for each in seen[0].facts.places
    ]
    return ", ".join(f"{name}: {each['system'] or each['kind']}" for name, each in named)


CHECK = Check("paths", PathFacts, collect, evaluate, summary)
