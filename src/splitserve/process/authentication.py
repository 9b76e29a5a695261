"""Authentication of connections between the processes of a cluster: one scheme, keyed by the cluster token.

Every port has keys of its own, derived from the token by its purpose, so a proof for one port is invalid at another.
No port sends the token.

  data port, node join port   mutual challenge and response (`InitiatorHandshake`, `ResponderHandshake`)
  bootstrap server (HTTP)     challenge and response per request (`Challenges`, `answer_challenge`)
  control port, rank pipes    ZeroMQ's CURVE, with the listener's key pair derived from the token (`curve_keys`)

The handshake is the same on every stream. All integers are little-endian:

  hello      magic, version, nonce, length of the name | name      initiator -> responder
  challenge  magic, version, nonce, proof                          responder -> initiator
  answer     proof                                                 initiator -> responder

A proof is an HMAC-SHA256 over both nonces, the name and the end that sends it. Magic and version never move, so that an
error can report both versions. An empty token offers no protection. No function here waits or opens a socket.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
import struct
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from splitserve.core.clock import Clock

TOKENS_DIFFER = "the cluster tokens differ, or one side has none: start all workers with the same --cluster-token-file"
NONCE_BYTES = 16
PROOF_BYTES = 32
MAX_NAME_BYTES = 256
# Maximum number of outstanding nonces: more than a flood without the token can use up during a valid client's request.
MAX_OUTSTANDING = 65_536
LIFETIME_SECONDS = 30.0

_HELLO = struct.Struct(f"<4sH{NONCE_BYTES}sH")
_CHALLENGE = struct.Struct(f"<4sH{NONCE_BYTES}s{PROOF_BYTES}s")
CHALLENGE_BYTES = _CHALLENGE.size
_INITIATOR, _RESPONDER, _FRAMES = b"initiator", b"responder", b"frames"
_HTTP_CHALLENGE = re.compile(r'Splitserve nonce="([0-9a-f]{32})"')
_HTTP_ANSWER = re.compile(r'Splitserve nonce="([0-9a-f]{32})", proof="([0-9a-f]{64})"')


class AuthenticationError(Exception):
    """Error for a peer that does not hold the token, has another version or uses another protocol."""


def derive_key(token: bytes, purpose: str, salt: bytes = b"") -> bytes:
    """Return 32 bytes: the first block of HKDF-SHA256 (RFC 5869)."""
    extracted = hmac.digest(salt, token, hashlib.sha256)
    return hmac.digest(extracted, f"splitserve {purpose}".encode() + b"\x01", hashlib.sha256)


def mac(key: bytes, *fields: bytes) -> bytes:
    """Return the HMAC-SHA256 over fields, each with its length in front: no two lists of fields have the same bytes."""
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in fields)
    return hmac.digest(key, framed, hashlib.sha256)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Key pair of ZeroMQ's CURVE, in Z85. A listener's public key is secret, too: a peer needs it to connect."""

    public: bytes
    secret: bytes = field(repr=False)


def curve_keys(token: bytes, purpose: str, salt: bytes = b"") -> CurveKeys:
    secret = z85.encode(derive_key(token, purpose, salt))
    return CurveKeys(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class StreamProtocol:
    """Protocol of a port on which connections begin with the handshake. `name` is in its keys and in errors."""

    name: str
    magic: bytes
    version: int

    def difference(self, magic: bytes, version: int) -> str | None:
        """Return why a peer that sent these cannot use this protocol. None: it can."""
        if magic != self.magic:
            return f"the peer does not use Splitserve's {self.name} protocol"
        if version != self.version:
            ours = f"{self.name} protocol version {self.version}"
            return f"{ours} against {version}: run the same Splitserve release on both sides"
        return None


class FrameSeals:
    """Seals of the frames of one connection. The seal of a forged, dropped, repeated or reordered frame is wrong."""

    def __init__(self, key: bytes, own: bytes, other: bytes) -> None:
        self._key = key
        self._own, self._other = own, other
        self._num_sent = 0
        self._num_received = 0

    def seal(self, payload: bytes) -> bytes:
        """Return the seal of the next frame to send."""
        self._num_sent += 1
        return mac(self._key, self._own, self._num_sent.to_bytes(8, "little"), payload)

    def is_valid(self, seal: bytes, payload: bytes) -> bool:
        """Return whether this is the seal of the next frame to receive. Call it once per frame."""
        self._num_received += 1
        return hmac.compare_digest(seal, mac(self._key, self._other, self._num_received.to_bytes(8, "little"), payload))


class _Handshake:
    def __init__(self, protocol: StreamProtocol, token: bytes) -> None:
        self._protocol = protocol
        self._key = derive_key(token, protocol.name)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        # What each proof covers: the nonces of initiator and responder, and the name.
        self._transcript = (b"", b"", b"")

    def _proof(self, what: bytes) -> bytes:
        return mac(self._key, what, *self._transcript)


class InitiatorHandshake(_Handshake):
    """Handshake of the end that connects: send `hello`, receive `CHALLENGE_BYTES`, send what `answer` returns."""

    def __init__(self, protocol: StreamProtocol, token: bytes, name: bytes = b"") -> None:
        """`name`: what the connection is for; both ends' proofs cover it."""
        super().__init__(protocol, token)
        self._name = name
        self.hello = _HELLO.pack(protocol.magic, protocol.version, self._nonce, len(name)) + name

    def answer(self, challenge: bytes) -> bytes:
        """Check the responder's proof and return our own. Raises AuthenticationError."""
        magic, version, theirs, proof = _CHALLENGE.unpack(challenge)
        if difference := self._protocol.difference(magic, version):
            raise AuthenticationError(difference)
        self._transcript = (self._nonce, theirs, self._name)
        if not hmac.compare_digest(proof, self._proof(_RESPONDER)):
            raise AuthenticationError(TOKENS_DIFFER)
        return self._proof(_INITIATOR)

    def seals(self) -> FrameSeals:
        """Return the seals of this connection. Call it after `answer`."""
        return FrameSeals(self._proof(_FRAMES), _INITIATOR, _RESPONDER)


class ResponderHandshake(_Handshake):
    """Handshake of the end that listens.

    Feed at most `wanted` bytes at a time, and send what `feed` returns. The handshake is over when one of two fields is
    set: `peer_name`, because the initiator has authenticated, or `problem`, because it must be rejected.
    """

    def __init__(self, protocol: StreamProtocol, token: bytes) -> None:
        super().__init__(protocol, token)
        self.peer_name: str | None = None
        self.problem: str | None = None
        # Received bytes of the current part, and its size.
        self._data = b""
        self._steps = self._run()
        self._size, _ = next(self._steps)

    @property
    def is_over(self) -> bool:
        return self.peer_name is not None or self.problem is not None

    @property
    def wanted(self) -> int:
        """Return the number of bytes that the current part still needs."""
        return self._size - len(self._data)

    def feed(self, data: bytes) -> bytes:
        """Process received bytes and return the bytes to send."""
        self._data += data
        reply = b""
        while not self.is_over and not self.wanted:
            part, self._data = self._data, b""
            self._size, sent = self._steps.send(part)
            reply += sent
        return reply

    def seals(self) -> FrameSeals:
        """Return the seals of this connection. Call it after the initiator has authenticated."""
        return FrameSeals(self._proof(_FRAMES), _RESPONDER, _INITIATOR)

    def _run(self) -> Generator[tuple[int, bytes], bytes, None]:
        """Process one part after the other. Yield the size of the next part, and the bytes to send before it."""
        magic, version, theirs, size = _HELLO.unpack((yield _HELLO.size, b""))
        difference = self._protocol.difference(magic, version)
        if magic != self._protocol.magic or size > MAX_NAME_BYTES:
            self.problem = difference or f"a name of {size} bytes"
        elif difference is not None:
            # An initiator of another version reads only our version from this challenge, so the proof is zeros.
            yield size, self._challenge(bytes(PROOF_BYTES))
            # Reject only now: a close before the initiator's last byte is read could discard our version in flight.
            self.problem = difference
        else:
            name = yield size, b""
            self._transcript = (theirs, self._nonce, name)
            proof = yield PROOF_BYTES, self._challenge(self._proof(_RESPONDER))
            if hmac.compare_digest(proof, self._proof(_INITIATOR)):
                self.peer_name = name.decode(errors="replace")
            else:
                self.problem = TOKENS_DIFFER
        yield 0, b""

    def _challenge(self, proof: bytes) -> bytes:
        return _CHALLENGE.pack(self._protocol.magic, self._protocol.version, self._nonce, proof)


class ProofVerdict(enum.Enum):
    """Result of the check of an HTTP request."""

    GOOD = enum.auto()
    # No proof, or one for a nonce that is not outstanding.
    MISSING = enum.auto()
    # Proof made with another token, or for another request.
    WRONG = enum.auto()


class Challenges:
    """Nonces issued by an HTTP server, and the check of proofs.

    1. A request without a proof is answered 401 with a nonce: `WWW-Authenticate: Splitserve nonce="N"`.
    2. The client sends it again with `Authorization: Splitserve nonce="N", proof="P"`. P covers the nonce, the method,
       the path with its query and a digest of the body: it is valid for this request alone.
    3. The server invalidates the nonce, good proof or not. A wrong proof is answered 403. An unknown nonce (too old, or
       of an earlier server) counts as no proof: 401 with another nonce.
    """

    def __init__(self, token: bytes, clock: Clock) -> None:
        self._token = token
        self._clock = clock
        # Nonce -> clock time of its expiry, oldest first.
        self._outstanding: OrderedDict[str, float] = OrderedDict()

    def issue(self) -> str:
        """Return a WWW-Authenticate header with a new nonce."""
        now = self._clock.now()
        while self._outstanding and (
            len(self._outstanding) >= MAX_OUTSTANDING or next(iter(self._outstanding.values())) <= now
        ):
            self._outstanding.popitem(last=False)
        nonce = secrets.token_hex(NONCE_BYTES)
        self._outstanding[nonce] = now + LIFETIME_SECONDS
        return f'Splitserve nonce="{nonce}"'

    def check(self, authorization: str, method: str, target: str, body: bytes) -> ProofVerdict:
        """Check the Authorization header (empty: none) of this request. `target`: path and query as sent."""
        found = _HTTP_ANSWER.fullmatch(authorization)
        if found is None:
            return ProofVerdict.MISSING
        nonce, proof = found.groups()
        if self._outstanding.pop(nonce, 0.0) <= self._clock.now():
            return ProofVerdict.MISSING
        is_good = hmac.compare_digest(proof, _request_proof(self._token, nonce, method, target, body))
        return ProofVerdict.GOOD if is_good else ProofVerdict.WRONG


def answer_challenge(token: bytes, challenge: str, method: str, target: str, body: bytes) -> str | None:
    """Return the Authorization header for a WWW-Authenticate header. None if it is not a challenge of this scheme."""
    found = _HTTP_CHALLENGE.fullmatch(challenge)
    if found is None:
        return None
    nonce = found[1]
    return f'Splitserve nonce="{nonce}", proof="{_request_proof(token, nonce, method, target, body)}"'


def _request_proof(token: bytes, nonce: str, method: str, target: str, body: bytes) -> str:
    fields = (part.encode(errors="surrogateescape") for part in (nonce, method, target))
    return mac(derive_key(token, "bootstrap"), *fields, hashlib.sha256(body).digest()).hex()
