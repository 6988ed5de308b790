"""A configuration file that somebody else may have changed is refused with the cure, whatever way leads to it."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from srunddp.bootstrap import ifaces, secure_path
from srunddp.errors import ConfigError
from tests.run.starting import srunddp, write

ENTRY = '- nodes: "*"\n  interface: auto\n'
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")


def stranger() -> int:
    """A user id that nothing here belongs to."""
    return next(user for user in range(61234, 61334) if user not in secure_path.owners())


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = write(tmp_path / "site" / "ifaces.conf", ENTRY)
    path.chmod(0o644)
    path.parent.chmod(0o755)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        ifaces.load(str(path), {})
    message = str(caught.value)
    assert (caught.value.exit_code, message.isprintable()) == (78, True)
    assert "; expected " in message
    return message


def notes(path: Path) -> tuple[str, ...]:
    return ifaces.load(str(path), {}).notes


def link(path: Path, to: Path | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)
    return path


def test_a_file_of_the_users_own_is_read_without_a_word(conf: Path) -> None:
    assert ifaces.load(str(conf), {}) == ifaces.Loaded(ifaces.parse(ENTRY.encode(), str(conf)), str(conf), ())


# Who owns it.


@as_root
def test_a_file_of_another_user_is_refused(conf: Path) -> None:
    os.chown(conf, user := stranger(), -1)
    assert refused(conf).startswith(f"{conf}: it belongs to user id {user}; expected root, yourself or ")
    assert f"copy the file to a folder of yours, or `chown root {conf}`" in refused(conf)


@as_root
@pytest.mark.parametrize("up", [0, 1])
def test_a_file_in_a_folder_of_another_user_is_refused(conf: Path, up: int) -> None:
    folder = (conf.parent, conf.parent.parent)[up]
    os.chown(folder, user := stranger(), -1)
    assert refused(conf).startswith(f"{conf}: {folder} belongs to user id {user}; ")


@as_root
def test_a_link_of_another_user_is_refused_wherever_it_leads(conf: Path) -> None:
    path = link(conf.with_name("link.conf"), conf)
    assert notes(path) == ()
    os.lchown(path, user := stranger(), -1)
    assert refused(path).startswith(f"{path}: it belongs to user id {user}; ")
    assert notes(conf) == ()


@as_root
def test_a_link_of_another_user_among_the_folders_is_refused(conf: Path) -> None:
    folder = link(conf.parent.parent / "link", conf.parent)
    assert notes(folder / conf.name) == ()
    os.lchown(folder, user := stranger(), -1)
    assert refused(folder / conf.name).startswith(f"{folder / conf.name}: {folder} belongs to user id {user}; ")


@as_root
def test_the_owner_of_srunddps_code_is_trusted_as_is_the_one_of_the_root_folder(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service account's software folder, and a user namespace: both own what runs anyway."""
    code = write(tmp_path / "software" / "srunddp" / "secure_path.py", "")
    os.chown(conf, user := stranger(), -1)
    monkeypatch.setattr(secure_path, "__file__", str(code))
    assert refused(conf)
    os.chown(code.parent.parent, user, -1)
    assert notes(conf) == ()
    assert os.lstat("/").st_uid in secure_path.owners()


@as_root
def test_root_and_the_user_are_trusted_by_the_user(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(conf, user := stranger(), -1)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert notes(conf) == ()


# Who may write.


@pytest.mark.parametrize("mode", [0o646, 0o602, 0o666, 0o1666])
def test_a_file_that_every_user_may_write_is_refused(conf: Path, mode: int) -> None:
    conf.chmod(mode)
    assert refused(conf).startswith(f"{conf}: it may be changed by every user; ")
    assert refused(conf).endswith(f" -> chmod o-w {conf}")


@pytest.mark.parametrize("up", [0, 1])
def test_a_file_in_a_folder_that_every_user_may_write_is_refused(conf: Path, up: int) -> None:
    folder = (conf.parent, conf.parent.parent)[up]
    folder.chmod(0o777)
    assert refused(conf).startswith(f"{conf}: {folder} may be changed by every user; ")
    assert refused(conf).endswith(f" -> chmod o-w {folder}")


def test_the_cure_is_a_command_whatever_the_name(tmp_path: Path) -> None:
    conf = write(tmp_path / "a b\n'c" / "ifaces.conf", ENTRY)
    conf.parent.chmod(0o777)
    assert re.search(r" -> chmod o-w '.*/a b\\n", refused(conf))


def test_a_sticky_folder_that_every_user_may_write_is_fine(conf: Path) -> None:
    conf.parent.chmod(0o1777)
    assert notes(conf) == ()


@as_root
def test_what_another_user_has_put_into_a_sticky_folder_is_refused(conf: Path) -> None:
    conf.parent.chmod(0o1777)
    os.chown(conf, stranger(), -1)
    assert "it belongs to user id" in refused(conf)


def test_the_way_that_a_link_leads_is_looked_at_too(conf: Path, tmp_path: Path) -> None:
    path = link(tmp_path / "own" / "ifaces.conf", "../site/ifaces.conf")
    assert notes(path) == ()
    conf.parent.chmod(0o777)
    assert refused(path).startswith(f"{path}: {conf.parent} may be changed by every user; ")


def test_a_link_in_a_folder_that_every_user_may_write_is_refused(conf: Path, tmp_path: Path) -> None:
    path = link(tmp_path / "open" / "ifaces.conf", conf)
    path.parent.chmod(0o777)
    assert refused(path).startswith(f"{path}: {path.parent} may be changed by every user; ")


def test_no_way_around_by_dots_and_relative_names(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (conf.parent / "open").mkdir()
    (conf.parent / "open").chmod(0o777)
    monkeypatch.chdir(conf.parent)
    assert notes(Path("ifaces.conf")) == ()
    assert "may be changed by every user" in refused(Path("open/../ifaces.conf"))
    monkeypatch.chdir(conf.parent / "open")
    assert "may be changed by every user" in refused(Path("../ifaces.conf"))


@as_root
def test_what_a_group_may_write_is_noted_once_and_read(conf: Path) -> None:
    for path in (conf, conf.parent):
        os.chown(path, -1, 61234)
        path.chmod(0o775)
    told = notes(conf)
    assert [note.partition(" may be changed by all of group id 61234; expected ")[0] for note in told] == [
        str(conf.parent),
        str(conf),
    ]
    assert told[1].endswith(f"chmod g-w {conf}")


@as_root
def test_the_users_own_group_may_write_to_a_folder_without_a_word_and_a_group_of_many_may_not(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """umask 002, as many distributions have it, where nobody else is in a group: it has the user's number."""
    user = stranger()
    for number, group in ((user, user), (user, 100)):
        os.chown(conf.parent, number, group)
        os.chown(conf, number, group)
        conf.parent.chmod(0o775)
        monkeypatch.setattr(os, "geteuid", lambda: user)
        monkeypatch.setattr(os, "getegid", lambda group=group: group)
        noted = [f"{conf.parent} may be changed by all of group id 100"] if group == 100 else []
        assert [note.partition("; ")[0] for note in notes(conf)] == noted


@as_root
def test_roots_group_may_write_without_a_word(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = stranger()
    conf.chmod(0o664)
    conf.parent.chmod(0o775)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "getegid", lambda: 100)
    assert notes(conf) == ()


# What is no file.


def within(seconds: float, ask: Callable[[], str]) -> str:
    """The answer, had in time: a FIFO that nobody writes to would keep the reader for ever."""
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(seconds)
    assert answers, "it hangs"
    return answers[0]


def test_a_fifo_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "ifaces.conf")
    assert "is not a file" in within(10, lambda: refused(path))

    def read() -> str:
        with pytest.raises(ConfigError) as caught:
            secure_path.read(path)
        return str(caught.value)

    assert within(10, read).startswith(f"{path}: is not a regular file; ")


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero", "/dev/tty"])
def test_a_device_is_refused_unopened(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_path, "_judged", lambda *_: [])  # these may be written by every user
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(ConfigError, match="is not a regular file"):
        secure_path.read(device)
    assert "is not a file" in refused(Path(device))


def test_what_becomes_a_fifo_behind_our_back_is_refused(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def swapped(path: str, flags: int) -> int:
        conf.unlink()
        os.mkfifo(path)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", swapped)
    assert "is not a regular file" in within(10, lambda: refused(conf))


def test_what_becomes_writable_behind_our_back_is_refused(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def loosened(path: str, flags: int) -> int:
        conf.chmod(0o666)
        return opened(path, flags)

    monkeypatch.setattr(os, "open", loosened)
    assert "may be changed by every user" in refused(conf)


def test_a_dangling_link_leads_nowhere_and_so_does_a_circle(tmp_path: Path) -> None:
    dangling, circle = link(tmp_path / "a", "nowhere"), link(tmp_path / "b", "c")
    link(tmp_path / "c", "b")
    for path in (dangling, circle):
        assert refused(path).startswith(f"--ifaces: {path} is a link that leads nowhere; ")
    with pytest.raises(FileNotFoundError):
        secure_path.read(dangling)
    with pytest.raises(OSError, match="Too many levels") as caught:
        secure_path.read(circle)
    assert caught.value.errno == errno.ELOOP


def test_as_many_links_as_the_kernel_follows(conf: Path) -> None:
    for number in range(41):
        link(conf.parent / str(number), str(number - 1) if number else conf.name)
    assert secure_path.read(conf.parent / "39").data == conf.read_bytes() == (conf.parent / "39").read_bytes()
    for read in (secure_path.read, Path.read_bytes):
        with pytest.raises(OSError, match="Too many levels"):
            read(conf.parent / "40")


def test_a_place_of_its_own_that_holds_no_file_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO or a dangling link where the site's file belongs is no reason to go without it."""
    for path in (link(tmp_path / "link", "nowhere"), tmp_path / "fifo"):
        if path.name == "fifo":
            os.mkfifo(path)
        monkeypatch.setattr(ifaces, "candidates", lambda *_, path=path: [path])
        with pytest.raises(ConfigError, match=f"{path}: {path} is (a link|not a file).*remove it"):
            ifaces.load(None, {})


def test_a_hundred_megabytes_are_refused_unread(conf: Path) -> None:
    os.truncate(conf, 100 << 20)
    assert "more than 1 MiB" in refused(conf)


def test_a_file_that_does_not_tell_its_size_is_read_to_the_limit() -> None:
    """As those of /proc, which give a page at a time at most."""
    assert len(secure_path.read("/proc/self/status").data) > 100
    assert len(secure_path.read("/proc/self/maps").data) > 2 * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("data", [b"- nodes: a\0b\n", b"- nodes: \xff\n", b"\0" * 1000])
def test_nul_and_what_is_not_utf_8_are_refused_with_their_place(conf: Path, data: bytes) -> None:
    conf.write_bytes(data)
    assert re.match(rf"{re.escape(str(conf))}:1:[0-9]+: this is not YAML", refused(conf))


# By the command itself.


@as_root
def test_the_command_refuses_with_78_and_one_line_and_notes_a_group_once(conf: Path) -> None:
    def said(*options: str) -> tuple[int, str, str]:
        done = srunddp("--quiet", *options, "--ifaces", conf, write(conf.parent / "train.py", ""), folder=conf.parent)
        return done.returncode, done.stderr, done.stdout

    conf.chmod(0o646)
    code, errors, _ = said()
    assert (code, errors.count("\n")) == (78, 1)
    assert errors.startswith(f"srunddp: error: {conf}: it may be changed by every user; ")
    conf.chmod(0o664)
    os.chown(conf, -1, 61234)
    code, errors, table = said("--explain")
    assert (code, errors) == (0, "")
    assert table.count(f"note: {conf} may be changed by all of group id 61234; ") == 1
    code, errors, _ = said()
    assert (code, errors.count("\n")) == (0, 1)
    assert errors.startswith(f"srunddp: {conf} may be changed by all of group id 61234; ")
    os.chown(conf, stranger(), -1)
    code, errors, _ = said()
    assert (code, errors.count("\n")) == (78, 1)
