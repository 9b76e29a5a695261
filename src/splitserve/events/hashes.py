"""Names of blocks: a chain of hashes, so that a block's name stands for all tokens up to its end."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def block_hash(parent: int | None, tokens: Sequence[int]) -> int:
    """A signed 64-bit number. The same on every worker and at every start: no secret goes in."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(b"root" if parent is None else struct.pack("<q", parent))
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    return int.from_bytes(digest.digest(), "little", signed=True)
