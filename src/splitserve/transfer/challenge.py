"""Challenge and proof by which a client of the bootstrap server authenticates with the cluster token.

1. A request without a proof is answered 401 with a nonce: `WWW-Authenticate: Splitserve nonce="N"`.
2. The client sends it again with `Authorization: Splitserve nonce="N", proof="P"`. P is an HMAC-SHA256 under the token
   over the nonce, the method, the path with its query and a digest of the body: it is valid for this request alone.
3. The server invalidates the nonce, good proof or not. A wrong proof is answered 403. An unknown nonce (too old, or of
   an earlier server) counts as no proof: 401 with another nonce.

An empty token offers no protection. Pure: independent of server and client.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
from collections import OrderedDict

from splitserve.core.clock import Clock

TOKENS_DIFFER = "the cluster tokens differ, or one side has none: start all workers with the same --cluster-token-file"
# Maximum number of outstanding nonces: more than a flood without the token can use up during a valid client's request.
MAX_OUTSTANDING = 65_536
LIFETIME_SECONDS = 30.0

_CHALLENGE = re.compile(r'Splitserve nonce="([0-9a-f]{32})"')
_ANSWER = re.compile(r'Splitserve nonce="([0-9a-f]{32})", proof="([0-9a-f]{64})"')


class ProofRole(enum.Enum):
    GOOD = enum.auto()
    # No proof, or one for a nonce that is not outstanding.
    MISSING = enum.auto()
    # Proof made with another token, or for another request.
    WRONG = enum.auto()


class Challenges:
    """Nonces issued by the server, and the check of proofs."""

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
        nonce = secrets.token_hex(16)
        self._outstanding[nonce] = now + LIFETIME_SECONDS
        return f'Splitserve nonce="{nonce}"'

    def check(self, authorization: str, method: str, target: str, body: bytes) -> ProofRole:
        """Check the Authorization header (empty: none) of this request. `target`: path and query as sent."""
        found = _ANSWER.fullmatch(authorization)
        if found is None:
            return ProofRole.MISSING
        nonce, proof = found.groups()
        if self._outstanding.pop(nonce, 0.0) <= self._clock.now():
            return ProofRole.MISSING
        is_good = hmac.compare_digest(proof, _proof(self._token, nonce, method, target, body))
        return ProofRole.GOOD if is_good else ProofRole.WRONG


def answer(token: bytes, challenge: str, method: str, target: str, body: bytes) -> str | None:
    """Return the Authorization header for a WWW-Authenticate header. None if it is not a challenge of this scheme."""
    found = _CHALLENGE.fullmatch(challenge)
    if found is None:
        return None
    nonce = found[1]
    return f'Splitserve nonce="{nonce}", proof="{_proof(token, nonce, method, target, body)}"'


def _proof(token: bytes, nonce: str, method: str, target: str, body: bytes) -> str:
    digest = hashlib.sha256(body).hexdigest()
    said = "\0".join(("splitserve bootstrap", nonce, method, target, digest))
    return hmac.digest(token, said.encode(errors="surrogateescape"), hashlib.sha256).hex()
