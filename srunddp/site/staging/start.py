"""What starts ranks on a node, with all in its place there; sent to the nodes beside the node program."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

PLACES = "places.json"
Place = Mapping[str, str]


def merged(path: str, places: list[Place]) -> list[Place]:
    """These places, and those that an earlier push of the job has written to the file."""
    try:
        with open(path) as file:
            before = json.load(file)["places"]
    except FileNotFoundError:
        before = []
    paths = {place["path"] for place in places}
    return [*places, *(place for place in before if place["path"] not in paths)]


def launcher(folder: str, places: list[Place], start: Mapping[str, Any]) -> str:
    """A shell script that becomes srunddp.

    Args:
        folder: the job's; start: the interpreter ``python`` and the program ``srunddp`` where nothing is a copy.
    """
    env = next((place for place in places if place["role"] == "env"), None)
    lines = ["#!/bin/sh", f"export SRUNDDP_STAGED={shlex.quote(folder)}"]
    if env is None:
        words = [_moved(start[name], places) for name in ("python", "srunddp")]
    else:
        here = env["here"]
        variable = "VIRTUAL_ENV" if os.path.exists(f"{here}/pyvenv.cfg") else "CONDA_PREFIX"
        lines += [f"export {variable}={shlex.quote(here)}", f'PATH={shlex.quote(here + "/bin")}:"$PATH"']
        words = [f"{here}/bin/python", f"{here}/bin/srunddp"]
    return "\n".join([*lines, f'exec {shlex.join(words)} "$@"', ""])


def _moved(path: str, places: Iterable[Place]) -> str:
    for place in places:
        if path.startswith(place["path"] + "/"):
            return place["here"] + path.removeprefix(place["path"])
    return path


def write(path: str, text: str, mode: int) -> None:
    """Replace a file of our own as a whole."""
    with open(os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode), "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    os.replace(path + ".new", path)
