"""Finds, parses and checks ifaces.conf, the site's file that says which network interface each node
uses.

The file is YAML, a list of entries. The first entry whose ``nodes`` match a node applies to it.
"""

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from srunddp.bootstrap.network.ifaces_entry import DEFAULT, Entries
from srunddp.errors import ConfigError, Scope, file_errors
from srunddp.util.quick_dataclass import dataclass
from srunddp.util.yaml_source import compose

VARIABLE = "SRUNDDP_IFACES"


@dataclass(frozen=True)
class IfacesConfig:
    """The entries of one file, and why this file is used.

    Attributes:
        path: the file that has the entries; empty for the default entry.
        source: what named this file: an option, a variable, or the rule for default files.
        passed_over: the other files, each with the reason why it is not used.
    """

    entries: Entries = (DEFAULT,)
    path: str = ""
    source: str = "no file has entries: interface auto on every node"
    passed_over: tuple[str, ...] = ()


def load(named: str | None, variables: Mapping[str, str], option: str = "--ifaces") -> IfacesConfig:
    """Read the entries of the first file that has any, and record why this file was chosen.

    Args:
        named: the file that the option names, which comes before ``$SRUNDDP_IFACES`` and the
            default files; None without the option.
        variables: the environment variables.
        option: the option's name, for messages.

    Raises:
        ConfigError: the option or the variable names a file that does not exist, a file has an
            error, or a file in a default place may have been written by another user.
    """
    asked = {
        # The option comes last: if option and variable name the same file, messages name the
        # option.
        Path(path): origin
        for path, origin in ((variables.get(VARIABLE), VARIABLE), (named, option))
        if path
    }
    files = list(dict.fromkeys([*reversed(asked), *default_files()]))
    passed_over = []
    for number, path in enumerate(files):
        # Not Path.exists(), which raises an error if a name is too long, or a folder may not be
        # entered.
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
    """Return the default files, which are tried after ``--ifaces`` and ``$SRUNDDP_IFACES``: the
    file of the checkout or of the installation's prefix, then the file in /etc.
    """
    above = Path(__file__).resolve().parents[3:]  # the checkout, or site-packages
    if os.path.isfile(above[0] / "setup.py"):
        own = [above[0] / "etc"]
    else:
        # srunddp is in PREFIX/lib/python3.11/site-packages. After pip install --user or --prefix,
        # PREFIX is not Python's own prefix.
        prefixes = dict.fromkeys((above[min(3, len(above) - 1)], Path(sys.prefix)))
        own = [prefix / "etc" / "srunddp" for prefix in prefixes]
    return [folder / "ifaces.conf" for folder in (*own, Path("/etc/srunddp"))]


def _read(path: Path, origin: str) -> bytes:
    # Check this before opening the file: opening a named pipe would wait for a writer.
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
        # The owner of a file that the user has named is not checked: it may well lie in another
        # account's project folder.
        if not origin:
            _check_owner(path)
        return path.read_bytes()


def _check_owner(path: Path) -> None:
    """Refuse a file in a default place if another user may have written it, because its ``env``
    reaches every rank.

    Raises:
        ConfigError: the file or its folder belongs neither to root, nor to the user, nor to the
            owner of srunddp; or everybody may write to it, or a group that may not write to the
            code of srunddp.
        OSError: the owner of the file or of its folder cannot be read.
    """
    # In a user namespace, root may have another user id: that of the owner of "/".
    trusted = {os.geteuid(), *(os.stat(place).st_uid for place in ("/", __file__))}
    code = os.stat(os.path.dirname(__file__))
    # Check the folder too: a user who may write there can replace the file.
    for place in (path.resolve(), path.resolve().parent):
        status = place.stat()
        if status.st_uid not in trusted:
            others = f"belongs to user id {status.st_uid}"
        elif status.st_mode & stat.S_IWOTH:
            others = "may be changed by every user"
        elif status.st_mode & stat.S_IWGRP and not _may_group_write(code, status.st_gid):
            others = f"may be changed by group id {status.st_gid}"
        else:
            continue
        raise ConfigError(
            f"{path}: {place} {others}",
            expected="root's, yours, or that of srunddp's owner",
            hint="correct its owner and mode, or name the file with --ifaces",
            scope=Scope.NODE,
        )


def _may_group_write(status: os.stat_result, group: int) -> bool:
    """Whether a file or folder belongs to this group, and the group may write to it.

    A group that may write to the code of srunddp can reach the ranks anyway, without ifaces.conf.
    Such permissions are usual in a project's folder, and with umask 002 if each user has a group of
    their own.
    """
    return status.st_gid == group and bool(status.st_mode & stat.S_IWGRP)


def parse(text: bytes, path: str) -> Entries:
    """Parse the text of an ifaces.conf.

    Args:
        text: the content of the file.
        path: the path of the file, for messages.

    Returns:
        The entries; none if the file has nothing but comments.

    Raises:
        ConfigError: something in the file is wrong. The error names all that is wrong, each with
            file, line and column, what was found, what was expected, and a hint.
    """
    root = compose(
        text,
        path,
        expected="YAML",
        hint="see the example in the shipped etc/ifaces.conf",
        scope=Scope.NODE,
    )
    # The file has nothing but comments, or nothing after a `---`.
    if root is None or root.value == "":
        return ()
    from srunddp.bootstrap.network.ifaces_reader import Reader  # most ranks do not need it

    return Reader(path).entries(root)
