"""The site's file: which network interface each node uses. Found, parsed and checked, with file,
line and column.

The file is YAML, a list of entries; the first whose ``nodes`` match a node counts for it.
"""

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from srunddp.bootstrap.network.ifaces_entry import DEFAULT, Entries
from srunddp.errors import ConfigError, Scope, file_errors
from srunddp.util.yaml_source import compose

VARIABLE = "SRUNDDP_IFACES"


@dataclass(frozen=True)
class IfacesConfig:
    """The entries, and why they count.

    Attributes:
        path: the file that they are from; empty for the default.
        source: who named it; passed_over: the other files, and why.
    """

    entries: Entries = (DEFAULT,)
    path: str = ""
    source: str = "no file has entries: interface auto on every node"
    passed_over: tuple[str, ...] = ()


def load(named: str | None, variables: Mapping[str, str], option: str = "--ifaces") -> IfacesConfig:
    """Read the entries of the first file that has any, and say why it is that one.

    Args:
        named: a file that comes before ``$SRUNDDP_IFACES`` and the default ones; None for none.
        variables: the environment variables.
        option: by which it was named, for messages.

    Raises:
        ConfigError: a file that was asked for is not there, or a file is wrong, or somebody else's
            in a default place.
    """
    asked = {
        # The option comes last: if both name one file, messages name the option.
        Path(path): origin
        for path, origin in ((variables.get(VARIABLE), VARIABLE), (named, option))
        if path
    }
    files = list(dict.fromkeys([*reversed(asked), *default_files()]))
    passed_over = []
    for number, path in enumerate(files):
        # os.path says False where Path raises: for a name that is too long, below a folder that is
        # closed.
        if path not in asked and not os.path.lexists(path):
            passed_over.append(f"{path}: not there")
        elif entries := parse(_read(path, asked.get(path, "")), str(path)):
            passed_over += [f"{other}: {path} comes first" for other in files[number + 1 :]]
            source = asked.get(path, "the first that has entries")
            return IfacesConfig(entries, str(path), source, tuple(passed_over))
        else:
            passed_over.append(f"{path}: has no entries")
    return IfacesConfig(passed_over=tuple(passed_over))


def default_files() -> list[Path]:
    """Return the files that are looked at after ``--ifaces`` and ``$SRUNDDP_IFACES``: the
    checkout's or prefix's, /etc's.
    """
    above = Path(__file__).resolve().parents[3:]  # the checkout, or site-packages
    if os.path.isfile(above[0] / "setup.py"):
        own = [above[0] / "etc"]
    else:
        # PREFIX/lib/python3.11/site-packages; another prefix than Python's after pip install --user
        # or --prefix.
        prefixes = dict.fromkeys((above[min(3, len(above) - 1)], Path(sys.prefix)))
        own = [prefix / "etc" / "srunddp" for prefix in prefixes]
    return [folder / "ifaces.conf" for folder in (*own, Path("/etc/srunddp"))]


def _read(path: Path, origin: str) -> bytes:
    # Before it is opened: to open a named pipe would wait for a writer.
    if not os.path.isfile(path):
        if os.path.islink(path):
            missing = "a link that leads nowhere"
        else:
            missing = "not there"
        found = f"{path} is {'not a file' if os.path.exists(path) else missing}"
        hint = f"correct {origin}" if origin else "remove it"
        raise ConfigError(
            found,
            expected="a file of interface entries",
            hint=hint,
            where=origin or str(path),
            scope=Scope.NODE,
        )
    found = f"{path}: cannot be read"
    hint = "correct its permissions"
    with file_errors(found, expected="a readable file", hint=hint, scope=Scope.NODE):
        # Whoever names a file has chosen to trust it, such as one in a project folder of another
        # account.
        if not origin:
            _check_owner(path)
        return path.read_bytes()


def _check_owner(path: Path) -> None:
    """Refuse a file that nobody named and somebody else may have written: its ``env`` reaches every
    rank.

    Raises:
        ConfigError: its owner, or its folder's, is neither root, the user nor the owner of srunddp;
            all may write.
        OSError: it cannot be looked at.
    """
    # In a user namespace root appears as another number, the one that the root folder has.
    trusted = {os.geteuid(), *(os.stat(place).st_uid for place in ("/", __file__))}
    # The folder as well: who may write there can put another file in the place of this one.
    for place in (path.resolve(), path.resolve().parent):
        status = place.stat()
        if status.st_uid in trusted and not status.st_mode & stat.S_IWOTH:
            continue
        if status.st_uid in trusted:
            others = "may be changed by every user"
        else:
            others = f"belongs to user id {status.st_uid}"
        raise ConfigError(
            f"{path}: {place} {others}",
            expected="root's, yours, or of the owner of srunddp",
            hint="correct its owner and mode, or name the file with --ifaces",
            scope=Scope.NODE,
        )


def parse(text: bytes, path: str) -> Entries:
    """Parse the text of an ifaces.conf.

    Args:
        text: what is in the file.
        path: where it is, for messages.

    Returns:
        Its entries; none where the file has nothing but comments.

    Raises:
        ConfigError: with file, line and column, what was found, what was expected and the hint, for
            all that is wrong.
    """
    root = compose(
        text,
        path,
        expected="YAML",
        hint="see the example in the shipped etc/ifaces.conf",
        scope=Scope.NODE,
    )
    # Nothing but comments, or nothing after a `---`.
    if root is None or root.value == "":
        return ()
    from srunddp.bootstrap.network.ifaces_reader import Reader  # which most ranks do not need

    return Reader(path).entries(root)
