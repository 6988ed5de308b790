"""Makes and checks proofs that both ends of a connection belong to one run. The token in a hello is
no proof, because other processes can know it: it only prevents mix-ups.

A rank's kind of proof is ``secret`` if PMI or MPI has carried a secret to it; else ``munge`` if
Slurm's authentication service works on its node; else ``none``. Both ends need the same kind.
"""

import contextlib
import ctypes
import json
import os
from collections.abc import Iterator
from typing import ClassVar

from srunddp.util.quick_dataclass import dataclass

KINDS = ("secret", "munge", "none")
# The roles of the two ends. A proof contains the role of its maker, so that it cannot be sent back
# as the other end's proof.
SERVER = "rank 0"
CLIENT = "rank"
MUNGE_SOCKET = "SRUNDDP_MUNGE_SOCKET"
SECRET_BYTES = 32
EXPECTED = "one proof that all nodes have"
HINT = (
    "start munged with one key on all nodes, or use `srun --mpi=pmi2`, whose secret needs no munge"
)
# The hint about a process without the run's secret. It does not advise munge as HINT does, because
# such a process is not part of the run.
IMPOSTOR_HINT = "see who listens there (ss -tlnp), or name other ports with --port"
_LONGEST_NONCE = 64

# Constants from munge.h.
_SOCKET = 8
_UID_RESTRICTION = 9


class ProofError(Exception):
    """A proof cannot be made or read; the text says why."""


def mismatch(kind: str, rank_zeros: str) -> str:
    """Return the text about a rank whose kind of proof differs from rank 0's."""
    return f"its proof is {kind}, rank 0's {rank_zeros}"


def mismatches(kind: str) -> list[str]:
    """Return the texts of :func:`mismatch` about a rank with this kind of proof: one for each other
    kind that rank 0 may have.
    """
    return [mismatch(kind, other) for other in KINDS if other != kind]


@dataclass(frozen=True)
class Challenge:
    """The values that a proof on one connection has to contain. Both ends know all of them.

    Attributes:
        token: the run's token.
        rank: the rank that says hello.
        server_address: rank 0's address of this connection, so that a process in between cannot
            relay a proof from another port.
        client_nonce, server_nonce: the random numbers of the rank and of rank 0.
    """

    token: str
    rank: int
    server_address: str
    client_nonce: str
    server_nonce: str

    def text(self, role: str) -> bytes:
        """Return the bytes over which ``SERVER`` or ``CLIENT`` (the role) computes its proof."""
        # JSON separates the fields. If they were only joined, two different challenges could give
        # the same bytes.
        return json.dumps(["srunddp", role, *vars(self).values()]).encode()


@dataclass(frozen=True)
class Authenticator:
    """Makes and checks proofs of one of ``KINDS``. This base class is the kind ``none``: it accepts
    every process that has the token.
    """

    kind: ClassVar[str] = "none"

    def sign(self, text: bytes) -> str:
        """Make a proof of a text.

        Raises:
            ProofError: munged cannot make a proof now.
        """
        return ""

    def why_invalid(self, proof: object, text: bytes) -> str:
        """Return why a value is no proof of a text; empty if it is one.

        Args:
            proof: the value that the other end has sent, of any type.
            text: the bytes that the other end has to prove.
        """
        return ""


@dataclass(frozen=True)
class HmacAuthenticator(Authenticator):
    """HMAC-SHA256 with a key that the launcher's own channel carried to the ranks."""

    key: bytes
    kind: ClassVar[str] = "secret"

    def sign(self, text: bytes) -> str:
        import hmac

        return hmac.digest(self.key, text, "sha256").hex()

    def why_invalid(self, proof: object, text: bytes) -> str:
        import hmac

        # Compare bytes, because compare_digest() refuses texts with letters outside ASCII, which a
        # peer may send.
        right = isinstance(proof, str) and hmac.compare_digest(
            proof.encode(errors="replace"), self.sign(text).encode()
        )
        if right:
            return ""
        return "it does not have the secret of this run"


@dataclass(frozen=True)
class MungeAuthenticator(Authenticator):
    """Credentials that munged makes for this user, and that only this user can decode.

    Attributes:
        library: libmunge.
        socket: the path of munged's socket; empty for the default.
    """

    library: ctypes.CDLL
    socket: str = ""
    kind: ClassVar[str] = "munge"

    def sign(self, text: bytes) -> str:
        made = ctypes.c_char_p()
        with self._context() as context:
            self._check(
                self.library.munge_encode(
                    ctypes.byref(made), context, text, ctypes.c_int(len(text))
                )
            )
        proof = (made.value or b"").decode()
        # munge_encode() has allocated the text. If it failed, free() of a null pointer does
        # nothing.
        _libc.free(made)
        return proof

    def why_invalid(self, proof: object, text: bytes) -> str:
        if not isinstance(proof, str):
            return "it sent no credential"
        try:
            user, proven = self._decode(proof.encode(errors="replace"))
        except ProofError as reason:
            return str(reason)
        # The restriction that _context() sets limits who can decode a credential, not who can make
        # one: any user can make one that we can decode.
        if user != os.geteuid():
            return f"its user is {user}, ours is {os.geteuid()}"
        if proven == text:
            return ""
        return "its credential is for something else"

    def _decode(self, proof: bytes) -> tuple[int, bytes]:
        data = ctypes.c_void_p()
        size = ctypes.c_int()
        user = ctypes.c_uint32()
        group = ctypes.c_uint32()
        with self._context() as context:
            answer = self.library.munge_decode(
                proof, context, *map(ctypes.byref, (data, size, user, group))
            )
        if data.value:
            text = ctypes.string_at(data, size.value)
        else:
            text = b""
        _libc.free(data)
        # Check the answer even if there is a text: munge_decode() also decodes a credential that
        # has expired or was replayed, and only its answer says so.
        self._check(answer)
        return user.value, text

    @contextlib.contextmanager
    def _context(self) -> Iterator[ctypes.c_void_p]:
        context = ctypes.c_void_p(self.library.munge_ctx_create())
        try:
            self._check(
                self.library.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_uint32(os.geteuid()))
            )
            if self.socket:
                self._check(
                    self.library.munge_ctx_set(
                        context, _SOCKET, ctypes.c_char_p(os.fsencode(self.socket))
                    )
                )
            yield context
        finally:
            self.library.munge_ctx_destroy(context)

    def _check(self, answer: int) -> None:
        if answer:
            raise ProofError(
                f"munge: {self.library.munge_strerror(answer).decode(errors='replace')}"
            )


_libc = ctypes.CDLL(None)


CHOICE = "munge where it works on this node, else none"
"""The rule of :func:`choose_authenticator` without a secret, as messages describe it."""


def choose_authenticator(secret: str = "") -> Authenticator:
    """Choose this rank's kind of proof.

    Args:
        secret: the secret that PMI or MPI has carried, in hexadecimal; empty if none has.
    """
    if secret:
        return HmacAuthenticator(bytes.fromhex(secret))
    return _munge_here() or Authenticator()


def _munge_here() -> MungeAuthenticator | None:
    try:
        library = ctypes.CDLL("libmunge.so.2")
    except OSError:
        return None
    # By default ctypes assumes that a result is an int, and would truncate a pointer to 32 bits.
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_strerror.restype = ctypes.c_char_p
    munge = MungeAuthenticator(library, os.environ.get(MUNGE_SOCKET, ""))
    # Try it: the library may be installed although munged does not run, or refuses this user.
    trial = b"srunddp"
    with contextlib.suppress(ProofError):
        return None if munge.why_invalid(munge.sign(trial), trial) else munge
    return None


def nonce() -> str:
    """Return a random number in hexadecimal, to be used for one connection only."""
    return os.urandom(16).hex()


def is_nonce(value: object) -> bool:
    """Whether a value that a peer has sent is a text of the length of a nonce."""
    # A short nonce could be guessed or come again, and an old proof would then be valid again.
    return isinstance(value, str) and len(nonce()) <= len(value) <= _LONGEST_NONCE
