"""Packs a folder into a tar file, and unpacks it on a node.

The nodes get the text of this module, as they may have no srunddp: except :mod:`srunddp.errors` it
needs the standard library only.
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
    """What an archive holds.

    Attributes:
        sha256: of the archive, in hex; the same for the same names and links, and files of the same
            time and content.
        size: bytes of content.
        files: number of files, folders and links.
        links: an environment's links to its interpreter, ``bin/NAME`` to an absolute path; not in
            the archive.
    """

    sha256: str
    size: int
    files: int
    links: dict[str, str]


def pack(folder: str, archive: str, *, leave_out: Sequence[str] = ()) -> ArchiveInfo:
    """Pack a folder's files, folders and links, without owners; sockets, FIFOs and devices are left
    out.

    Args:
        folder: the names in the archive begin below it.
        archive: a new file.
        leave_out: patterns as in the shell: of a name anywhere, or with a slash before the end of a
            path from here on.

    Raises:
        ConfigError: a link leads out of the folder, or something cannot be read or changes
            meanwhile.
        OSError: the archive cannot be written.
    """
    try:
        return _packed(folder, archive, leave_out)
    except OSError as error:
        if error.filename in (None, archive):
            raise
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}",
            expected="a folder that you may read whole",
            hint="leave it out with --exclude",
        ) from None


def _packed(folder: str, archive: str, leave_out: Sequence[str]) -> ArchiveInfo:
    size = 0
    files = 0
    links = {}
    # PAX headers hold paths of any length, and names that are not UTF-8.
    with tarfile.open(archive, "x", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for info, status in _entries(folder, leave_out):
            if info.linkname.startswith("/"):
                # It leads out of the folder, which tarfile's filter refuses. `unpack` makes such
                # links itself.
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
    """Yield what is to be packed, each folder before what is in it, in an order that is always the
    same.
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
    """Return the header of an archive's entry; None for what is never packed, such as a socket."""
    info = tarfile.TarInfo(name)
    kind = stat.S_IFMT(status.st_mode)
    # A copy is for its user alone, so of the mode only one thing matters: whether it is a program.
    if kind == stat.S_IFDIR or status.st_mode & stat.S_IXUSR:
        info.mode = 0o700
    else:
        info.mode = 0o600
    if kind == stat.S_IFREG:
        info.size = status.st_size
        # Folders get no time. Theirs changes with each entry that is made in them, even one that
        # is left out of the archive, and the hash would change with it.
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
    """Pack a regular file as it was found; one that has grown, as the job's own log does, up to the
    length that it had.

    Raises:
        ConfigError: it has changed in another way since ``before``.
    """
    # Since its lstat() a link may have taken its place, which would lead elsewhere, or a FIFO, on
    # which open() would wait for a writer.
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(source, "rb") as file:
        try:
            tar.addfile(info, file)
        finally:
            # Also after an error of addfile(), which fails for a file that has become shorter: that
            # it has changed is the better message.
            if not _is_same(before, os.fstat(source)):
                raise ConfigError(
                    f"{path} has changed while it was packed",
                    expected="a folder in which nothing writes",
                    hint="leave it out with --exclude",
                )


def _is_same(before: os.stat_result, now: os.stat_result) -> bool:
    """Whether it is one file, with the content that it had or a longer one."""
    file = (before.st_dev, before.st_ino, before.st_mode) == (now.st_dev, now.st_ino, now.st_mode)
    content = (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
    return file and (content or now.st_size > before.st_size)


def _target(folder: str, name: str) -> str:
    """Return where a link is to lead: a relative path to what is in the folder, or an absolute one
    to an environment's interpreter.

    Raises:
        ConfigError: it leads out of the folder to something else.
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
        hint=f"copy into the folder what it leads to, or --exclude={name}",
    )


def unpack(archive: str, folder: str, *, sha256: str, links: Mapping[str, str]) -> None:
    """Unpack an archive of :func:`pack` into a new folder: all of it, or nothing.

    Args:
        archive: a file in a folder that nobody else may change, as ``folder`` is.
        sha256: of the archive, in hex.
        links: more links to make, by :class:`ArchiveInfo`.

    Raises:
        ConfigError: the archive is another one, or the folder cannot be written.
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
            # The same open file: what is unpacked is what the hash was of.
            file.seek(0)
            os.mkdir(new, 0o700)
            with tarfile.open(fileobj=file, encoding="utf-8") as tar:
                # From Python 3.11.4 on.
                tar.extraction_filter = getattr(tarfile, "data_filter", None)
                tar.extractall(new)
        # Last, so that nothing from the archive can be written through them.
        for link, target in links.items():
            os.symlink(target, os.path.join(new, link))
        # rename() replaces an empty folder at most: whatever else has the name stays.
        os.rename(new, folder)
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(
            f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}",
            expected="room and leave to write",
            hint="name another folder with --dir",
        ) from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
