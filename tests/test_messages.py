"""What two processes tell each other survives the line, and garbage is no message."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.bootstrap.rendezvous import messages as rendezvous
from srunddp.bootstrap.rendezvous.messages import RendezvousMessage
from srunddp.check.messages import CheckMessage, Connect
from srunddp.ifaces import scan
from srunddp.stage.messages import StageMessage
from srunddp.supervisor import messages as supervisor
from srunddp.supervisor.failure import Failure, FailureCategory, FailureKind, GpuFaultKind
from srunddp.supervisor.messages import HasFailed, RankMessage
from srunddp.supervisor.worker_messages import WorkerMessage
from srunddp.util.messages import Message
from tests.support import message_table

PROTOCOLS = (RankMessage, RendezvousMessage, WorkerMessage, CheckMessage, StageMessage)
EXIT_CODES = st.integers(1, 255)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
BY_NAME = {
    "source": ADDRESSES,
    "targets": st.lists(
        st.tuples(st.integers(0, 9), ADDRESSES, st.integers(1, 65535)), max_size=3
    ).map(tuple),
    "exit_code": EXIT_CODES,
    "weight": st.sampled_from([*map(int, FailureKind)]),
    "category": st.sampled_from([each.value for each in FailureCategory]),
    "text": st.text(max_size=100),
    "kind": st.sampled_from([each.value for each in GpuFaultKind]),
}


def kinds(protocol: type[Message]) -> list[type[Message]]:
    """All that were defined, some of them in a module of the command that uses them."""
    assert scan.Interfaces in CheckMessage.__subclasses__()
    found = set()
    for kind in protocol.__subclasses__():
        found |= {kind, *kinds(kind)}
    return sorted(found, key=lambda kind: kind.kind)


def values(wanted: Any) -> st.SearchStrategy[Any]:
    """Any value of an annotation."""
    if wanted is object:
        return JSON
    if wanted is float:
        return st.floats(allow_nan=False)
    if dataclasses.is_dataclass(wanted):
        return dataclass_of(wanted)
    match getattr(wanted, "__origin__", None), getattr(wanted, "__args__", ()):
        case (_, (inner, last)) if last is ...:
            return st.lists(values(inner), max_size=3).map(tuple)
        case (origin, inner) if origin is tuple:
            return st.tuples(*map(values, inner))
        case (origin, (_, inner)) if origin is dict:
            return st.dictionaries(st.text(), values(inner), max_size=3)
        case (None, alternatives) if alternatives:
            return st.one_of(*map(values, alternatives))
    return st.from_type(wanted)


def dataclass_of(kind: Any) -> st.SearchStrategy[Any]:
    types = get_type_hints(kind)
    given_fields = {}
    for each in fields(kind):
        if each.name in BY_NAME:
            given_fields[each.name] = BY_NAME[each.name]
        else:
            given_fields[each.name] = values(types[each.name])
    return st.builds(kind, **given_fields)


def messages(protocol: type[Message]) -> st.SearchStrategy[Any]:
    """Any message of any kind."""
    return st.one_of([dataclass_of(kind) for kind in kinds(protocol)])


@pytest.mark.parametrize("module", [supervisor, rendezvous], ids=["supervisor", "rendezvous"])
def test_each_message_has_a_sender_and_a_name_of_its_own(module: Any) -> None:
    protocol = RankMessage if module is supervisor else RendezvousMessage
    assert {*kinds(protocol)} == {*module.FROM_A_RANK, *module.FROM_RANK_ZERO}
    assert len({kind.kind for kind in kinds(protocol)}) == len(kinds(protocol))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(st.data())
def test_a_message_survives_the_line(protocol: type[Message], data: st.DataObject) -> None:
    message = data.draw(messages(protocol))
    line = message.encode()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert protocol.decode(line) == message


def test_the_table_of_messages_is_that_of_the_code() -> None:
    """Else run: python -m tests.support.message_table."""
    page = message_table.PAGE.read_text()
    assert message_table.rendered(page) == page


@given(
    st.builds(
        Failure,
        st.integers(),
        st.text(),
        st.text(),
        EXIT_CODES,
        st.sampled_from(FailureKind),
        st.text(),
    )
)
def test_a_failure_survives_the_line(failure: Failure) -> None:
    message = RankMessage.decode(HasFailed.about(failure).encode())
    assert isinstance(message, HasFailed)
    assert message.failure(failure.rank, failure.node) == failure


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(st.data())
def test_of_whatever_comes_a_sound_message_is_made_or_none(
    protocol: type[Message], data: st.DataObject
) -> None:
    values = json.loads(data.draw(messages(protocol)).encode())
    name = data.draw(st.sampled_from([*sorted(values), "another"]))
    values[name] = data.draw(JSON)
    decoded = protocol.decode(json.dumps(values).encode())
    if decoded is not None:
        assert protocol.decode(decoded.encode()) == decoded
    if isinstance(decoded, HasFailed):
        assert 0 < decoded.failure(3, "node04").exit_code < 256
    if name == "another":
        assert (decoded is not None) == protocol.extensible


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "line", [b"", b"no json", b"[1]", b"7", b"{}", b"[" * 9000, b"\xff", b'{"kind": []}']
)
def test_a_line_that_is_no_message_gives_none(protocol: type[Message], line: bytes) -> None:
    assert protocol.decode(line) is None


def test_a_number_too_large_for_a_float_is_no_message() -> None:
    assert CheckMessage.decode(b'{"kind": "clock", "time": ' + b"9" * 400 + b"}") is None


def test_more_fields_of_another_version_are_ignored_within_others_too() -> None:
    probe = {"source": "10.0.0.1", "host": "10.0.0.2", "port": 1, "colour": "blue"}
    line = json.dumps({"kind": "connect", "probes": [probe], "more": 1}).encode()
    message = CheckMessage.decode(line)
    assert isinstance(message, Connect)
    assert message.probes[0].host == "10.0.0.2"
    assert RankMessage.decode(b'{"kind": "uses_mpi", "more": 1}') is None
