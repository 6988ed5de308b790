"""A connection that is tried says why it fails, and comes from where it is told to come."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from srunddp.bootstrap.network import probe as network_probe
from srunddp.bootstrap.network.probe import (
    NO_ANSWER,
    Probe,
    Prober,
    connect,
    connect_all,
    half_open,
)
from tests.support.connections import silent


@pytest.fixture
def there() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        yield listener


def probe(listener: socket.socket, source: str, **known: object) -> Probe:
    return Probe(source=source, host="127.0.0.1", port=listener.getsockname()[1], **known)  # type: ignore[arg-type]


def test_it_sends_from_its_own_address(there: socket.socket) -> None:
    assert connect(probe(there, "127.0.0.3")) == ""
    connection, (host, _) = there.accept()
    connection.close()
    assert host == "127.0.0.3"


def test_bound_to_an_interface_only_its_own_ways_count(
    there: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the other is in another subnet, the kernel would send from 127.0.0.1."""
    monkeypatch.setattr(network_probe, "shares_subnet", lambda own, other: own == "127.0.0.4")
    assert connect(probe(there, "127.0.0.4", interface="lo")) == ""
    assert connect(probe(there, "127.0.0.2", interface="lo")) == "routed over another interface"
    assert connect(probe(there, "127.0.0.1", interface="lo")) == ""


def test_of_one_that_does_not_answer_that_is_said() -> None:
    """As where a firewall drops what is sent."""
    with silent("127.0.0.1") as full:
        assert connect(probe(full, "127.0.0.1", brief=True)) == NO_ANSWER


def test_hundreds_are_tried_and_each_has_its_own_answer(there: socket.socket) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        probes = [probe(there if number % 2 else closed, "127.0.0.1") for number in range(300)]
        found = connect_all(probes)
    assert found == ["" if number % 2 else "connection refused" for number in range(300)]


def test_it_listens_where_it_can_and_anew_when_it_is_asked_again(there: socket.socket) -> None:
    prober = Prober()
    assert prober.listen("192.0.2.7") == 0
    port = prober.listen("127.0.0.1")
    way = Probe(source="127.0.0.1", host="127.0.0.1", port=port)
    assert connect(way) == ""
    assert prober.listen("127.0.0.1") != port
    assert connect(way) == "connection refused"
    assert connect(probe(there, "192.0.2.7")) == "cannot assign requested address"


def test_connections_whose_answer_gets_lost_are_told_by_their_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prober = Prober()
    port = prober.listen("127.0.0.1")
    half = psutil.CONN_SYN_RECV
    whole = psutil.CONN_ESTABLISHED
    found = [
        ("10.0.0.2", port, half),
        ("10.0.0.3", port, whole),
        ("10.0.0.4", port + 1, half),
        ("10.0.0.5", port, half),
    ]
    connections = [
        SimpleNamespace(
            status=status, laddr=SimpleNamespace(port=own), raddr=SimpleNamespace(ip=other)
        )
        for other, own, status in found
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda _: connections)
    assert half_open(prober.listeners.values()) == ["10.0.0.2", "10.0.0.5"]
