"""Proof that both ends of a connection belong to one world. The token of a hello only prevents
mix-ups.

What a rank has decides the kind of proof: ``secret`` where PMI or MPI carried one to it, else
``munge`` where Slurm's authentication service works on this node, else ``none``. Both ends need the
same kind.
"""

import contextlib
import ctypes
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

KINDS = ("secret", "munge", "none")
# The roles, so that no proof can be sent back to its maker.
SERVER = "rank 0"
CLIENT = "rank"
MUNGE_SOCKET = "SRUNDDP_MUNGE_SOCKET"
SECRET_BYTES = 32
EXPECTED = "one proof that all nodes have"
HINT = (
    "start munged with one key on all nodes, or use `srun --mpi=pmi2`, whose secret needs no munge"
)
_LONGEST_NONCE = 64

# munge.h
_SOCKET = 8
_UID_RESTRICTION = 9


class ProofError(Exception):
    """A proof that cannot be made, with the reason."""


@dataclass(frozen=True)
class Challenge:
    """What a proof is about, the same on both ends.

    Attributes:
        token: of the run; rank: that says hello.
        server_address: rank 0's end of this connection, so that nobody in between passes a proof on
            from another port.
        client_nonce, server_nonce: the nonces of the rank and of rank 0.
    """

    token: str
    rank: int
    server_address: str
    client_nonce: str
    server_nonce: str

    def text(self, role: str) -> bytes:
        """Return what the prover of a role, ``SERVER`` or ``CLIENT``, proves."""
        # JSON marks where each field ends: simply joined, two challenges could give one text.
        return json.dumps(["srunddp", role, *vars(self).values()]).encode()


@dataclass(frozen=True)
class Authenticator:
    """One kind of proof, of ``KINDS``. This class itself proves nothing: whoever has the token is
    believed.
    """

    kind: ClassVar[str] = "none"

    def sign(self, text: bytes) -> str:
        """Make a proof of a text.

        Raises:
            ProofError: it cannot be made now.
        """
        return ""

    def why_invalid(self, proof: object, text: bytes) -> str:
        """Tell why something is no proof of a text; empty where it is one.

        Args:
            proof: what the other end has sent, which may be anything.
            text: what it has to be about.
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

        # As bytes, since compare_digest() takes only texts in ASCII, and a peer may send any.
        right = isinstance(proof, str) and hmac.compare_digest(
            proof.encode(errors="replace"), self.sign(text).encode()
        )
        if right:
            return ""
        return "it does not have the secret of this run"


@dataclass(frozen=True)
class MungeAuthenticator(Authenticator):
    """Credentials that munged, on its socket or the default one, makes for this user, and only this
    user can decode.
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
        # munge_encode() has allocated it; free() of a null pointer does nothing.
        _libc.free(made)
        return proof

    def why_invalid(self, proof: object, text: bytes) -> str:
        if not isinstance(proof, str):
            return "it sent no credential"
        try:
            user, proven = self._decode(proof.encode(errors="replace"))
        except ProofError as reason:
            return str(reason)
        # The restriction that _context() sets says who can decode a credential, and not who can
        # make one: anybody can make one for us.
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
        # One that is expired or replayed is decoded as well.
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
"""What :func:`choose_authenticator` goes by without a secret, for people."""


def choose_authenticator(secret: str = "") -> Authenticator:
    """Choose this rank's kind of proof.

    Args:
        secret: in hexadecimal; empty where neither PMI nor MPI carried one.
    """
    if secret:
        return HmacAuthenticator(bytes.fromhex(secret))
    return _munge_here() or Authenticator()


def _munge_here() -> MungeAuthenticator | None:
    try:
        library = ctypes.CDLL("libmunge.so.2")
    except OSError:
        return None
    # ctypes takes a result for an int by default, which cuts a pointer to 32 bits.
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_strerror.restype = ctypes.c_char_p
    munge = MungeAuthenticator(library, os.environ.get(MUNGE_SOCKET, ""))
    # The library may be installed where munged does not run, or refuses us.
    trial = b"srunddp"
    with contextlib.suppress(ProofError):
        return None if munge.why_invalid(munge.sign(trial), trial) else munge
    return None


def nonce() -> str:
    """Make a number that is used once."""
    return os.urandom(16).hex()


def is_nonce(value: object) -> bool:
    """Whether a peer's nonce has the form of one."""
    # A short one could be guessed, or come again, and an old proof with it.
    return isinstance(value, str) and len(nonce()) <= len(value) <= _LONGEST_NONCE
