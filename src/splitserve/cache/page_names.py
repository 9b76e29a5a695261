"""Names of whole pages: a chain of digests. A page's name stands for all tokens up to its end, as its KV does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from struct import pack

from splitserve.cache.prefix import PageKey

PageName = bytes


def page_names(keys: Iterable[PageKey], behind: PageName = b"") -> Iterator[PageName]:
    """The name of each page, the first one's behind the page `behind`; empty: it begins the prompt.

    128 bits of a cryptographic hash: nobody finds two prompts with one name. No secret goes in: a page has the same
    name on every worker and after every start.
    """
    name = behind
    for key in keys:
        name = blake2b(name + pack(f"{len(key)}q", *key), digest_size=16).digest()
        yield name


def block_hash(name: PageName) -> int:
    """What KV events call the page: a signed 64-bit number."""
    return int.from_bytes(name[:8], "little", signed=True)
