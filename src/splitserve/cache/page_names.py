"""Names of whole pages: a chain of digests. A page's name depends on all tokens up to its end, as its KV does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from struct import pack

from splitserve.cache.prefix import PageKey

PageName = bytes


def page_names(keys: Iterable[PageKey], behind: PageName = b"") -> Iterator[PageName]:
    """Return the name of each page. The first page follows the page named `behind`; empty: it begins the prompt.

    Names are 128 bits of a cryptographic hash, so two different prompts do not get the same name. No secret is part of
    it: a page has the same name on every worker and after every start.
    """
    name = behind
    for key in keys:
        name = blake2b(name + pack(f"{len(key)}q", *key), digest_size=16).digest()
        yield name


def block_hash(name: PageName) -> int:
    """Return the page's hash in KV events: a signed 64-bit number."""
    return int.from_bytes(name[:8], "little", signed=True)
