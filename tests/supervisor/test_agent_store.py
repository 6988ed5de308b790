"""The agent store of rank 0's supervisor: it is started by the first process that connects, and
ends with the supervisor, and nothing else ends it.

A stand-in takes torch's place, which would cost seconds. Real stores are those of
tests/run/test_agent_store.py.
"""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from srunddp.bootstrap.rendezvous.protocol import bind_store, listen
from srunddp.errors import RendezvousError
from srunddp.supervisor.agent_store import AgentStore
from srunddp.supervisor.signals import pidfd_open
from tests.support.starting import until, write
from tests.support.worlds import Ended, is_gone, run, world

# It answers each connection, and leaves a file with its process id, its descriptors and its
# connections so far.
STORE = """
import os, socket, threading
def serve(listening):
    while True:
        connection, _ = listening.accept()
        connection.sendall(str(os.getpid()).encode())
class TCPStore:
    def __init__(self, host, port, *, is_master, master_listen_fd, **others):
        assert is_master
        listening = socket.socket(fileno=master_listen_fd)
        assert listening.getsockname() == (host, port)
        open(f"store.{os.getpid()}", "w").write(str(len(os.listdir("/proc/self/fd"))))
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
"""
ASK = """
import socket
def ask():
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.create_connection(where, timeout=100) as connection:
        return int(connection.recv(100))
"""


def stand_in(folder: Path) -> dict[str, str]:
    """The variables with which the stand-in is found."""
    write(folder / "lib" / "torch" / "__init__.py", "")
    write(folder / "lib" / "torch" / "_C" / "__init__.py", "")
    write(folder / "lib" / "torch" / "_C" / "_distributed_c10d.py", STORE)
    return {"PYTHONPATH": str(folder / "lib")}


def stores(folder: Path) -> list[int]:
    """The process ids of all stores that there were."""
    return [int(path.suffix[1:]) for path in folder.glob("store.*")]


def ran(folder: Path, script: str, *options: str) -> Ended:
    return run(folder, ASK + script, *options, size=2, variables=stand_in(folder))


def test_it_is_started_by_the_first_connection(tmp_path: Path) -> None:
    """All others come to the same process, and it keeps open nothing of the launcher's."""
    script = ASK + "print(*{ask() for _ in range(3)})"
    opened = ["sh", "-c", 'exec 7</dev/null 8</dev/null 9</dev/null; exec "$@"', "sh"]
    ended = run(tmp_path, script, size=2, variables=stand_in(tmp_path), below={0: opened})
    assert ended.codes == [0, 0], ended.text
    (process,) = stores(tmp_path)
    assert ended.printed == [f"{process}\n"] * 2
    until(lambda: is_gone(process))
    # Standard streams, the socket, the folder that is read, and the file that is written.
    assert int((tmp_path / f"store.{process}").read_text()) <= 6


CHILDREN = """
children = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text()
others = {*children.split()} - {str(os.getpid())}
print([f"SigBlk:\\tffff" in Path(f"/proc/{pid}/status").read_text() for pid in others])
"""


def test_a_run_in_which_nobody_connects_has_none(tmp_path: Path) -> None:
    ended = ran(tmp_path, CHILDREN)
    assert ended.codes == [0, 0], ended.text
    assert ended.printed == ["[True]\n"] * 2
    assert stores(tmp_path) == []


SIGNALS = """
store = ask()
if RANK == 0:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTSTP):
        os.kill(store, number)
    print(ask() == store)
"""


def test_no_signal_of_a_launcher_ends_it(tmp_path: Path) -> None:
    """These go to all processes of a group or a step, and ranks may still be saving."""
    ended = ran(tmp_path, SIGNALS)
    assert ended.codes == [0, 0], ended.text
    assert ended.printed[0] == "True\n"


def test_without_torch_it_says_so_and_refuses(tmp_path: Path) -> None:
    variables = stand_in(tmp_path)
    (tmp_path / "lib" / "torch" / "_C" / "_distributed_c10d.py").unlink()
    script = """
import contextlib
with contextlib.suppress(ValueError, OSError):
    ask()
"""
    ended = run(tmp_path, ASK + script, size=2, variables=variables)
    assert ended.codes == [0, 0], ended.text
    empty, line = ended.text.splitlines()
    assert empty == ""
    assert line.startswith("srunddp: no store at MASTER_PORT")
    assert "_distributed_c10d" in line


def test_it_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = ASK + 'say("store", ask())\nrest()'
    with world(tmp_path, script, size=2, variables=stand_in(tmp_path)) as it:
        until(lambda: it.has_said("store.0") and it.has_said("store.1"))
        it.ranks[0].send_signal(signal.SIGKILL)
        it.wait()
    process = int((tmp_path / "store.0").read_text())
    until(lambda: is_gone(process))


def listens() -> AgentStore:
    """One that nobody has started."""
    listening = listen("127.0.0.1", [0])
    host, port = listening.getsockname()
    return AgentStore(listening, host, port)


@contextmanager
def does_not_open(file: Path) -> Iterator[None]:
    """Let whoever opens a file wait, as on a file system that does not answer. It has a lease, for
    which the kernel waits 45 s by default.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for the lease by it
    descriptor = os.open(file, os.O_RDONLY)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            pytest.skip(f"no leases on this file system: {error}")
        yield
    finally:
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)


def test_an_interpreter_that_does_not_come_holds_only_the_process_of_the_store_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor goes on, and no connection of its own stays open for that."""
    interpreter = tmp_path / "python"
    shutil.copy("/bin/true", interpreter)
    monkeypatch.setattr("sys.executable", str(interpreter))
    store = listens()
    ours, theirs = socket.socketpair()
    ours.settimeout(10.0)
    with does_not_open(interpreter), ours:
        began = time.monotonic()
        store.start()
        assert time.monotonic() - began < 10.0
        process = store.process
        assert process is not None
        theirs.close()
        assert ours.recv(1) == b"", "the process of the store has a copy"
        assert not is_gone(process)
        store.close()
        assert is_gone(process)


def test_once_closed_it_is_not_watched_though_a_process_has_a_copy_of_the_socket() -> None:
    store = listens()
    with selectors.DefaultSelector() as selector, store.listening.dup() as copy:
        store.watch(selector, lambda _: None)
        with socket.create_connection(copy.getsockname()):
            ((key, _),) = selector.select(10.0)
            assert key.fileobj is store
            assert store.close()
            assert selector.select(0.1) == []
        with socket.socket() as other:
            selector.register(other, selectors.EVENT_READ)
        assert store.close(), "a second time"


def test_a_process_that_has_the_id_of_one_that_has_ended_is_not_killed() -> None:
    store = listens()
    command = ["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
    store.process = int(subprocess.run(command, capture_output=True, check=True).stdout)
    other = store.process
    end = pidfd_open(other)
    try:
        assert store.close()
        assert select.select([end], [], [], 0.5)[0] == [], "it has ended"
    finally:
        os.close(end)
        os.kill(other, signal.SIGKILL)


AFTER_A_FAILURE = """
def late(*_):
    try:
        ask()
    except (OSError, ValueError) as error:
        print(type(error).__name__, flush=True)
    os._exit(0)

signal.signal(signal.SIGTERM, late)
say("handles")
if RANK == 1:
    wait_for("handles.0")
    sys.exit(3)
rest()
"""


def test_who_comes_first_after_a_root_cause_is_refused(tmp_path: Path) -> None:
    """It does not wait for a store that nobody starts any more."""
    ended = ran(tmp_path, AFTER_A_FAILURE)
    assert ended.codes == [3, 3], ended.text
    assert ended.printed[0] in ("ConnectionResetError\n", "ConnectionRefusedError\n")
    assert stores(tmp_path) == []


ENDS_FIRST = """
store = ask()
say("asked")
wait_for("asked.0", "asked.1")
if RANK == 0:
    os._exit(0)
while not is_gone(int(Path("ready.0").read_text())):
    time.sleep(0.01)
print(ask() == store)
"""


def test_it_stays_until_all_scripts_are_over(tmp_path: Path) -> None:
    """It is no process that rank 0's worker has left behind."""
    ended = ran(tmp_path, ENDS_FIRST)
    assert ended.codes == [0, 0], ended.text
    assert ended.printed[1] == "True\n"


RESTART = """
import srunddp
START = srunddp.restart_count()
say(f"asked{START}", ask())
wait_for(*(f"asked{START}.{rank}" for rank in range(SIZE)))
before = Path(f"asked0.{RANK}").read_text()
if START == 0:
    if RANK == 1:
        sys.exit(3)
    rest()
print(before == Path(f"asked1.{RANK}").read_text(), is_gone(int(before)))
"""


def free_range(size: int) -> str:
    """Ports in a row that are free."""
    for first in range(41000, 60000, 50):
        try:
            held = [listen("127.0.0.1", [first + number]) for number in range(size)]
        except RendezvousError:
            continue
        for each in held:
            each.close()
        return f"{first}-{first + size - 1}"
    raise AssertionError


@pytest.mark.parametrize("ports", [None, 2, 3])
def test_each_start_has_its_own(tmp_path: Path, ports: int | None) -> None:
    """Also where a firewall leaves only as many ports as rank 0 needs without it."""
    options = ["--restarts=1"]
    if ports:
        options.append(f"--port={free_range(ports)}")
    ended = ran(tmp_path, RESTART, *options)
    assert ended.codes == [0, 0], ended.text
    assert ended.printed == ["False True\n"] * 2
    assert len(stores(tmp_path)) == 2


def test_without_a_free_port_there_is_none() -> None:
    """The port of the rendezvous is the last that is taken, and free only afterwards."""
    rendezvous = listen("127.0.0.1", [0])
    bound = bind_store("127.0.0.1", rendezvous, [0])
    ports = (bound.rendezvous_address.port, bound.store_address.port)
    held = replace(bound, ports=ports)
    with held.store:
        with rendezvous:
            assert held.listen_for_agent_store() is None
        found = held.listen_for_agent_store()
        assert found is not None
        with found:
            assert found.getsockname()[1] == ports[0]
