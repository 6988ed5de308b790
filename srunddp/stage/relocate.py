"""Makes an environment that can be moved: its scripts find the interpreter beside themselves."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

# As uv and distlib have it: the shell runs the second line, and for Python both are a string.
_SHEBANG = """#!/bin/sh
'''exec' "$(dirname -- "$(readlink -f -- "$0")")/python"{options} "$0" "$@"
' '''
"""
_ACTIVATE = """VIRTUAL_ENV=$(CDPATH= cd -- "$(dirname -- "${{BASH_SOURCE:-$0}}")/.." 2>/dev/null && pwd)
[ -f "$VIRTUAL_ENV/{mark}" ] || VIRTUAL_ENV={place}  # a shell that does not say which file it reads
"""
_LONG = re.compile(rb"""#!/bin/sh\n'''exec' "?(?P<path>[^"\n]+?)"?(?P<options>(?: -\w+)*) "\$0" "\$@"\n' '''\n""")
_SHORT = re.compile(rb"#! ?(?P<path>/[^\n]*?/python[\d.]*)(?P<options>(?: -\w+)*) *\r?\n")
_OTHER_SHELLS = ("activate.csh", "activate.fish", "Activate.ps1")


def script(text: str, options: str = "") -> str:
    """A Python script that runs under the interpreter in its own folder."""
    return _SHEBANG.format(options=options) + text


def make_relocatable(environment: Path, place: Path, mark: str) -> None:
    """Rewrite what names the folder in which the environment was built.

    Args:
        environment: a virtual environment, where it was built.
        place: where it will be first.
        mark: a file in it by which ``activate`` knows the folder.
    """
    scripts = environment / "bin"
    for path in scripts.iterdir():
        if path.is_file() and not path.is_symlink():
            _rewrite(path, bytes(scripts))
    for name in _OTHER_SHELLS:  # they cannot tell where they lie
        (scripts / name).unlink(missing_ok=True)
    _rewrite_activate(scripts / "activate", place, mark)
    settings = environment / "pyvenv.cfg"
    settings.write_text(settings.read_text().replace(str(environment), str(place)))


def _rewrite(path: Path, scripts: bytes) -> None:
    with path.open("rb") as file:
        if file.read(2) != b"#!":
            return
    text = path.read_bytes()
    found = _LONG.match(text) or _SHORT.match(text)
    if found and found["path"].rpartition(b"/")[0] == scripts:
        path.write_bytes(script("", found["options"].decode()).encode() + text[found.end() :])


def _rewrite_activate(path: Path, place: Path, mark: str) -> None:
    text, named = re.subn(
        r"^ *(?:export )?VIRTUAL_ENV=[\"'/].*\n",
        lambda _: _ACTIVATE.format(mark=mark, place=shlex.quote(str(place))),
        path.read_text(),
        flags=re.MULTILINE,
    )
    if named:
        path.write_text(text)
