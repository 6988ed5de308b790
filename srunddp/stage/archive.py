"""Packs a folder into a tar file, and unpacks the file on a node.

The nodes get the source of this module, because they may have no srunddp. So it imports only
:mod:`srunddp.errors` and the standard library.
"""

import fnmatch
import hashlib
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from srunddp.errors import ConfigError


class ArchiveInfo(NamedTuple):
    """What an archive contains.

    Attributes:
        sha256: The archive's hash, in hex. Two folders give the same hash if they contain the same
            names and links, and their files have the same content, time and execute permission.
        size: The sum of the files' sizes in bytes.
        files: The number of files, folders and links in the archive.
        links: The links of an environment to its interpreter, which are not in the archive: the
            absolute target of each link, by the link's name ``bin/NAME``.
    """

    sha256: str
    size: int
    files: int
    links: dict[str, str]


def pack(folder: str, archive: str, *, leave_out: Sequence[str] = ()) -> ArchiveInfo:
    """Pack the files, folders and links of a folder, without their owners. Sockets, FIFOs and
    devices are left out.

    Args:
        folder: The folder; the names in the archive are relative to it.
        archive: The path of the archive, which must not exist.
        leave_out: Patterns as in a shell. A pattern without a slash matches a name at any depth;
            one with a slash, other than at its end, matches a path relative to ``folder``.

    Raises:
        ConfigError: A link leads out of the folder, or a file cannot be read or changes while it is
            packed.
        OSError: The archive cannot be written.
    """
    try:
        return _packed(folder, archive, leave_out)
    except OSError as error:
        if error.filename in (None, archive):
            raise
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}",
            expected="a folder that you may read completely",
            hint="leave it out with --exclude",
        ) from None


def _packed(folder: str, archive: str, leave_out: Sequence[str]) -> ArchiveInfo:
    size = 0
    files = 0
    links = {}
    # Use the PAX format: its headers hold paths of any length, and names that are not UTF-8.
    with tarfile.open(archive, "x", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for info, status in _entries(folder, leave_out):
            if info.linkname.startswith("/"):
                # This link leads out of the folder, so tarfile's filter would refuse it. `unpack`
                # makes such links itself.
                links[info.name] = info.linkname
                continue
            if info.isreg():
                _add_file(tar, info, os.path.join(folder, info.name), status)
            else:
                tar.addfile(info)
            files += 1
            size += info.size
    with open(archive, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return ArchiveInfo(sha256, size, files, links)


def _entries(
    folder: str, leave_out: Sequence[str], below: str = ""
) -> Iterator[tuple[tarfile.TarInfo, os.stat_result]]:
    """Yield the entries to pack, in a fixed order, each folder before its contents.

    Args:
        folder: The folder to pack.
        leave_out: The patterns of :func:`pack`.
        below: A folder in ``folder``, with a slash at its end, whose entries are yielded; empty
            for ``folder`` itself.

    Yields:
        The header and the status of each entry.
    """
    here = os.path.join(folder, below).rstrip("/")
    names = sorted(os.listdir(here), key=os.fsencode)
    patterns = [each.rstrip("/") for each in leave_out]
    for name, status in [(below + name, os.lstat(os.path.join(here, name))) for name in names]:
        base = os.path.basename(name)
        if any(
            fnmatch.fnmatchcase(name if "/" in each else base, each.lstrip("/"))
            for each in patterns
        ):
            continue
        if info := _info(folder, name, status):
            yield info, status
            if info.isdir():
                yield from _entries(folder, leave_out, name + "/")


def _info(folder: str, name: str, status: os.stat_result) -> tarfile.TarInfo | None:
    """Return an entry's header; None for an entry that is never packed, such as a socket."""
    info = tarfile.TarInfo(name)
    kind = stat.S_IFMT(status.st_mode)
    # Only the user of the job reads a copy, so one bit of the mode matters: whether the file can be
    # executed.
    if kind == stat.S_IFDIR or status.st_mode & stat.S_IXUSR:
        info.mode = 0o700
    else:
        info.mode = 0o600
    if kind == stat.S_IFREG:
        info.size = status.st_size
        # Folders get no time. A folder's time changes with each entry that is made in it, even one
        # that is left out, and would change the archive's hash.
        info.mtime = int(status.st_mtime)
    elif kind == stat.S_IFDIR:
        info.type = tarfile.DIRTYPE
    elif kind == stat.S_IFLNK:
        info.type = tarfile.SYMTYPE
        info.linkname = _target(folder, name)
    else:
        return None
    return info


def _add_file(
    tar: tarfile.TarFile, info: tarfile.TarInfo, path: str, before: os.stat_result
) -> None:
    """Pack a regular file with the size in its header, even if the file has grown since, as the log
    of the running job does.

    Raises:
        ConfigError: The file has changed in another way since its status was ``before``.
    """
    # After its lstat(), the file may have been replaced by a link, which O_NOFOLLOW refuses, or by
    # a FIFO, where open() would wait for a writer without O_NONBLOCK.
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, "rb") as file:
        try:
            tar.addfile(info, file)
        finally:
            # Check after an error, too: addfile() fails for a file that has become shorter, and the
            # message below explains this better.
            if not _is_same(before, os.fstat(source)):
                raise ConfigError(
                    f"{path} has changed while it was packed",
                    expected="a folder in which nothing writes",
                    hint="leave it out with --exclude",
                )


def _is_same(before: os.stat_result, now: os.stat_result) -> bool:
    """Return whether both statuses are of the same file, which is unchanged or has only grown."""
    file = (before.st_dev, before.st_ino, before.st_mode) == (now.st_dev, now.st_ino, now.st_mode)
    content = (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
    return file and (content or now.st_size > before.st_size)


def _target(folder: str, name: str) -> str:
    """Return the target that a link gets in the archive: a relative path for a link into the
    folder, an absolute path for the link of an environment to its interpreter.

    Raises:
        ConfigError: The link leads out of the folder, and not from an environment to its
            interpreter.
    """
    path = os.path.join(folder, name)
    root = os.path.realpath(folder)
    place = os.path.realpath(path)
    if f"{place}/".startswith(f"{root}/"):
        return os.path.relpath(place, os.path.join(root, os.path.dirname(name)))
    interpreter = fnmatch.fnmatchcase(name, "bin/python*") and name.count("/") == 1
    if interpreter and os.path.isfile(os.path.join(folder, "pyvenv.cfg")) and os.path.isfile(place):
        return place
    raise ConfigError(
        f"{path} is a link to {place}, out of the folder",
        expected="links that lead to something in it",
        hint=f"copy the target into the folder, or --exclude={name}",
    )


def unpack(archive: str, folder: str, *, sha256: str, links: Mapping[str, str]) -> None:
    """Unpack an archive made by :func:`pack` into a new folder: completely or not at all.

    Args:
        archive: The archive. Like ``folder``, it is in a folder that no other user may change.
        folder: The new folder.
        sha256: The expected hash of the archive, in hex.
        links: Further links to make; see :class:`ArchiveInfo`.

    Raises:
        ConfigError: The archive has a different hash, or the folder cannot be written.
    """
    above, name = os.path.split(folder)
    new = os.path.join(above, f".{name}")
    try:
        with open(archive, "rb") as file:
            if (found := hashlib.file_digest(file, "sha256").hexdigest()) != sha256:
                raise ConfigError(
                    f"archive {archive} has the SHA-256 {found[:16]}…",
                    expected=f"{sha256[:16]}…",
                    hint="stage it again",
                )
            # Unpack from the same open file, so that exactly the hashed bytes are unpacked.
            file.seek(0)
            os.mkdir(new, 0o700)
            with tarfile.open(fileobj=file, encoding="utf-8") as tar:
                # Python older than 3.11.4 has no such filter, and unpacks without one.
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                tar.extractall(new)
        # Make the links last, so that nothing from the archive can be written through them.
        for link, target in links.items():
            os.symlink(target, os.path.join(new, link))
        # rename() replaces at most an empty folder; anything else with this name stays.
        os.rename(new, folder)
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(
            f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}",
            expected="free space, and the permission to write",
            hint="name another folder with --dir",
        ) from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
