"""What two supervisors tell each other survives the line, and garbage is no message."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srunddp.supervisor.failure import Failure, FailureCategory, FailureKind
from srunddp.supervisor.messages import FROM_A_RANK, FROM_RANK_ZERO, HasFailed, RankMessage
from tests.support import message_table

EXIT_CODES = st.integers(1, 255)
BY_TYPE = {
    "bool": st.booleans(),
    "float | None": st.none() | st.floats(allow_nan=False),
    "int": st.integers(),
    "str": st.text(),
    "str | None": st.none() | st.text(),
    "tuple[int, ...]": st.lists(st.integers()).map(tuple),
}
BY_NAME = {
    "exit_code": EXIT_CODES,
    "weight": st.sampled_from([*map(int, FailureKind)]),
    "category": st.sampled_from([each.value for each in FailureCategory]),
}


def kinds() -> list[type[RankMessage]]:
    return sorted(RankMessage.__subclasses__(), key=lambda kind: kind.kind)


def messages() -> st.SearchStrategy[RankMessage]:
    """Any message of any kind."""
    return st.one_of(
        st.builds(
            kind,
            **{each.name: BY_NAME.get(each.name, BY_TYPE[str(each.type)]) for each in fields(kind)},
        )
        for kind in kinds()
    )


def test_each_message_has_a_sender_and_a_name_of_its_own() -> None:
    assert {*kinds()} == {*FROM_A_RANK, *FROM_RANK_ZERO}
    assert len({kind.kind for kind in kinds()}) == len(FROM_A_RANK) + len(FROM_RANK_ZERO)


def test_the_table_of_messages_is_that_of_the_code() -> None:
    """Else run: python -m tests.support.message_table."""
    page = message_table.PAGE.read_text()
    assert message_table.rendered(page) == page


@given(messages())
def test_a_message_survives_the_line(message: RankMessage) -> None:
    line = message.encode()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert RankMessage.decode(line) == message


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(messages(), st.data())
def test_of_whatever_comes_a_sound_message_is_made_or_none(
    message: RankMessage, data: st.DataObject
) -> None:
    values = json.loads(message.encode())
    name = data.draw(st.sampled_from([*sorted(values), "another"]))
    values[name] = data.draw(json_values)
    decoded = RankMessage.decode(json.dumps(values).encode())
    if decoded is not None:
        assert RankMessage.decode(decoded.encode()) is not None
    if isinstance(decoded, HasFailed):
        assert 0 < decoded.failure(3, "node04").exit_code < 256
    if name == "another":
        assert decoded is None


@pytest.mark.parametrize(
    "line", [b"", b"no json", b"[1]", b"7", b"{}", b"[" * 9000, b"\xff", b'{"kind": []}']
)
def test_a_line_that_is_no_message_gives_none(line: bytes) -> None:
    assert RankMessage.decode(line) is None
