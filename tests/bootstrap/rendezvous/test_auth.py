from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from srunddp.bootstrap.rendezvous import auth, protocol
from srunddp.bootstrap.rendezvous.auth import Authenticator, Challenge, HmacAuthenticator
from srunddp.bootstrap.rendezvous.client import join
from srunddp.bootstrap.rendezvous.messages import (
    AbortReason,
    CannotCome,
    Here,
    Refused,
    RendezvousMessage,
    Seen,
)
from srunddp.bootstrap.rendezvous.protocol import Address
from srunddp.errors import PeerError, RendezvousError
from srunddp.util.messages import send
from tests.bootstrap.rendezvous.test_client import (
    NONCE,
    greeting,
    heard,
    hello,
    rank_zero,
    refusal,
    soon,
)
from tests.conftest import missing
from tests.support.munged import munged
from tests.support.starting import until

CHALLENGE = Challenge("1207.0.0", 3, "10.0.0.1:4000", NONCE, "1" * 32)
SECRET = HmacAuthenticator(b"s" * 32)


@pytest.fixture(scope="module")
def munge() -> Iterator[Authenticator]:
    with (
        tempfile.TemporaryDirectory() as folder,
        munged(Path(folder) / "one") as where,
        pytest.MonkeyPatch.context() as patch,
    ):
        Path(folder).chmod(0o755)
        patch.setenv(auth.MUNGE_SOCKET, where)
        chosen = auth.choose_authenticator()
        assert chosen.kind == "munge"
        yield chosen


@pytest.fixture(params=["secret", "munge"])
def prover(request: pytest.FixtureRequest) -> Authenticator:
    return SECRET if request.param == "secret" else request.getfixturevalue("munge")


# The proofs.


OTHERS: dict[str, Any] = {
    "token": "1207.1.0",
    "rank": 4,
    "server_address": "10.0.0.1:4001",
    "client_nonce": "2" * 32,
    "server_nonce": "2" * 32,
}


def test_a_proof_holds_for_what_it_is_about_alone(prover: Authenticator) -> None:
    """It cannot be sent back to its maker either."""
    text = CHALLENGE.text(auth.CLIENT)
    assert prover.why_invalid(prover.sign(text), text) == ""
    for name, value in OTHERS.items():
        assert prover.why_invalid(
            prover.sign(replace(CHALLENGE, **{name: value}).text(auth.CLIENT)), text
        )
    assert prover.why_invalid(prover.sign(CHALLENGE.text(auth.SERVER)), text)


@pytest.mark.parametrize("said", [None, 7, "", "MUNGE:", "x" * 4000, "\ud800", "MUNGE:\0:", ["a"]])
def test_what_is_no_proof_at_all_is_objected_to(prover: Authenticator, said: object) -> None:
    assert prover.why_invalid(said, CHALLENGE.text(auth.CLIENT))


def test_a_credential_counts_once(munge: Authenticator) -> None:
    text = CHALLENGE.text(auth.CLIENT)
    proof = munge.sign(text)
    assert munge.why_invalid(proof, text) == ""
    assert munge.why_invalid(proof, text) == "munge: Replayed credential"


def test_foreign_credential_is_refused(
    munge: Authenticator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with munged(tmp_path / "other") as where:
        monkeypatch.setenv(auth.MUNGE_SOCKET, where)
        proof = auth.choose_authenticator().sign(CHALLENGE.text(auth.CLIENT))
    assert munge.why_invalid(proof, CHALLENGE.text(auth.CLIENT)).startswith("munge: ")


@pytest.mark.parametrize(
    ("restricted_to", "why"), [(65534, "munge: Unauthorized credential"), (0, "its user is 65534")]
)
def test_another_users_credential_is_refused(
    munge: Authenticator, restricted_to: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restricted to that user it cannot be decoded; restricted to us it shows who made it."""
    if os.geteuid():
        missing("root, to become another user")
    text = CHALLENGE.text(auth.CLIENT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: restricted_to)
        os.seteuid(65534)
        try:
            proof = munge.sign(text)
        finally:
            os.seteuid(0)
    assert munge.why_invalid(proof, text).startswith(why)


# What a rank has.


def test_what_the_launchers_channel_carried_comes_first(munge: Authenticator) -> None:
    assert auth.choose_authenticator("ab" * 32) == HmacAuthenticator(b"\xab" * 32)


@pytest.mark.parametrize("where", ["/no/such/socket", "/dev/null"])
def test_where_munged_does_not_work_nothing_is_proven(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(auth.MUNGE_SOCKET, where)
    assert auth.choose_authenticator() == Authenticator()


def test_each_run_has_a_secret_of_its_own_and_shows_it_nowhere() -> None:
    first, second = (
        protocol.decode_advertisement(
            protocol.encode_advertisement("1207.0.0", [Address("::1", 4000)])
        )
        for _ in range(2)
    )
    assert (first.token, first.addresses) == ("1207.0.0", [Address("::1", 4000)])
    assert len(bytes.fromhex(first.secret)) == 32
    assert first.secret != second.secret
    assert first.secret not in repr(first)


def test_rank_zeros_failure_is_announced_in_one_word() -> None:
    text = "no file /a b/ü.py; expected a script to run -> " + "x" * 2000
    word = protocol.encode_abort(AbortReason(text, 78))
    assert not set(word) & set(" \t\n")
    assert len(word) < 800
    with pytest.raises(PeerError) as caught:
        protocol.decode_advertisement(word)
    assert caught.value.exit_code == 78
    assert text.startswith(str(caught.value)[:300])


@pytest.mark.parametrize(
    "text", ["", "x", "a@b@c", "t@10.0.0.1:x@00", "t@10.0.0.1:1@", "failed@x@y"]
)
def test_what_is_no_announcement_is_one_message(text: str) -> None:
    with pytest.raises(RendezvousError, match=r"rank 0 published .*; expected "):
        protocol.decode_advertisement(text)


# At the meeting.


@pytest.mark.parametrize(
    "said",
    [
        Here(""),
        Here("0" * 64),
        Here(NONCE),
        CannotCome("0" * 64, "the end", 9),
        AbortReason("the end", 9),
    ],
)
def test_a_caller_without_proof_leaves_one_line_in_the_log(
    prover: Authenticator, said: RendezvousMessage
) -> None:
    """Not though it knows the token, counts another world, or has a rank that is there already."""
    with rank_zero(3, trust=prover) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, [server.address], hello(1, 3), soon(), prover)
        until(lambda: 1 in server.rendezvous.connections)
        for one in (
            hello(2, 3),
            hello(1, 3, "node09", pid=9),
            hello(2, 77),
            hello(0, 3),
            hello(2, 3, address="::1"),
        ):
            with server.connect() as caller:
                send(caller, greeting(one, prover.kind))
                assert isinstance(heard(caller), Seen)
                send(caller, said)
                assert isinstance(heard(caller), Refused)
                assert caller.recv(100) == b""
        second = pool.submit(join, [server.address], hello(2, 3), soon(), prover)
        assert [first.result()[1], second.result()[1]] == [server.meeting()] * 2
        assert len(server.said) == 5
        assert server.said[0].startswith("refused rank 2 on node01 (127.0.0.1:")
        for meeting in (first, second):
            meeting.result()[0].close()


def test_a_rank_zero_without_the_proof_is_passed_over(prover: Authenticator) -> None:
    """It took the port, and knows the token."""
    other = HmacAuthenticator(b"t" * 32) if prover.kind == "secret" else Pretender()
    with rank_zero(2, trust=other) as pretender, rank_zero(2, trust=prover) as server:
        connection, meeting = join([pretender.address, server.address], hello(1), soon(), prover)
        connection.close()
        assert meeting == server.meeting()
        assert not pretender.rendezvous.connections
        with pytest.raises(RendezvousError, match="did not prove that it is rank 0: "):
            join([pretender.address], hello(1), soon(0.3), prover)


def test_the_words_of_a_process_that_proves_nothing_are_not_repeated(
    prover: Authenticator,
) -> None:
    """It holds the port, and may say whatever it likes; nor is munge the cure for a secret."""
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        pool.submit(_refuse_once, other)
        with pytest.raises(RendezvousError) as caught:
            join([Address(*other.getsockname()[:2])], hello(1), soon(0.3), prover)
    text = str(caught.value)
    assert "curl" not in text
    assert "refused it without a proof that it is rank 0" in text
    assert ("munge" in text) == (prover.kind == "munge")


def _refuse_once(other: socket.socket) -> None:
    caller, _ = other.accept()
    with caller:
        caller.recv(4096)
        send(caller, Refused("run curl evil|sh"))


class Pretender:
    """Says that it has munge, and makes proofs up."""

    kind = "munge"

    def sign(self, text: bytes) -> str:
        return "MUNGE:AwQFAAA=:"

    def why_invalid(self, proof: object, text: bytes) -> str:
        return ""


def test_a_relay_on_another_port_proves_nothing(prover: Authenticator) -> None:
    """It hands every byte on, in both directions, and would otherwise be taken for rank 0."""
    with rank_zero(2, trust=prover) as server, socket.create_server(("127.0.0.1", 0)) as between:
        address = Address(*between.getsockname()[:2])
        with ThreadPoolExecutor(1) as pool:
            passed_on = pool.submit(_pass_on_once, between, server.address)
            with pytest.raises(RendezvousError, match="did not prove that it is rank 0"):
                join([address], hello(1), soon(0.3), prover)
            passed_on.result(30)
        assert not server.rendezvous.connections


def _pass_on_once(between: socket.socket, to: Address) -> None:
    caller, _ = between.accept()
    with caller, socket.create_connection((to.host, to.port)) as onward:
        onward.sendall(caller.recv(4096))
        caller.sendall(onward.recv(4096))
        caller.recv(1)


@pytest.mark.parametrize(("zeros", "theirs"), [("secret", "none"), ("none", "secret")])
def test_two_kinds_of_proof_are_named_with_the_hint(zeros: str, theirs: str) -> None:
    kinds: dict[str, Authenticator] = {"secret": SECRET, "none": Authenticator()}
    with rank_zero(2, trust=kinds[zeros]) as server:
        found = (
            f"its proof is {theirs}, rank 0's {zeros}; expected one proof that all nodes have.*srun"
            " --mpi=pmi2"
        )
        with pytest.raises(RendezvousError, match=found):
            join([server.address], hello(1, node="node02"), soon(0.5), kinds[theirs])
        until(lambda: server.said)
        assert re.match(rf"refused rank 1 on node02 \(127.0.0.1:\d+\): {found}", server.said[0])
        assert not server.rendezvous.connections


def test_the_log_does_not_fill_with_refusals() -> None:
    with rank_zero(2, trust=SECRET) as server:
        for _ in range(40):
            with server.connect() as caller:
                caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
                caller.recv(100)
        assert len(server.said) == 10
        assert server.said[-1].endswith("; further ones are not named")
        assert refusal(server, hello(1), within=0.3)
