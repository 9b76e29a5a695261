"""Prefix caches: one that stores nothing, which has the contract, and a radix tree over whole pages.

Pages passed to `insert` belong to the cache from then on; pages returned by `evict` belong to the caller. A locked path
is never evicted. One contract suite, `tests/contract/test_prefix_cache.py`, runs against every implementation.

The tree (RadixAttention, Zheng et al., arXiv:2312.07104): an edge holds the tokens of one or more whole pages and the
pages themselves; children differ in the tokens of their first page. A path is locked by counting users on every node
from the leaf to the root. Eviction takes unlocked leaves, least recently used first. Recency is a counter, not time:
only the order of use matters. Evictable leaves are in a heap, each once, with their last use at that time; a leaf that
was used since is queued again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from splitserve.cache.kv_events import BlockRecord, PageKey, PageName, page_names
from splitserve.observe.events.schema import GPU


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix: pages of tokens [0, len(pages) x page_size)."""

    pages: list[int]
    # Place in the cache that can be locked. Opaque to callers.
    handle: Node | None


@dataclass(frozen=True, slots=True)
class Evicted:
    """Consecutive pages at the end of a path, which the cache evicted; they belong to the caller."""

    # Keys of every page of the path, from the first token on. The last len(pages) of them are those of `pages`.
    keys: list[PageKey]
    pages: list[int]


def split_pages(tokens: Sequence[int], page_size: int) -> list[PageKey]:
    return [tuple(tokens[i : i + page_size]) for i in range(0, len(tokens) - page_size + 1, page_size)]


class PrefixCache:
    """A cache that stores nothing: every prompt is computed anew. Base of the others."""

    # Whether inserted pages may be found again.
    remembers = False

    def __init__(self) -> None:
        # Pages the cache owns, and how many of these are locked.
        self.num_pages = 0
        self._num_locked_pages = 0

    @property
    def num_evictable_pages(self) -> int:
        return self.num_pages - self._num_locked_pages

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest cached prefix of `tokens`, in whole pages, and mark it as used; it is not locked."""
        return PrefixMatch([], None)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        """Store the KV of `tokens`, page by page; len(tokens) == len(pages) x page_size.

        Returns the cache's own pages for all of `tokens`, and the given pages that it did not take because it held that
        part already (or keeps nothing). The caller keeps these, and frees the ones it owned.
        """
        return PrefixMatch([], None), list(pages)

    def lock(self, handle: Node | None) -> None:
        """Keep the path from the root to `handle` from eviction until it is unlocked as often as locked."""

    def unlock(self, handle: Node | None) -> None:
        """Undo one `lock`."""

    def evict(self, num_pages: int) -> list[Evicted]:
        """Evict least recently used, unlocked pages until `num_pages` are found or none is left. May return more."""
        return []

    def check(self) -> None:
        """Raise AssertionError if counters and structure disagree."""


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the tree and its children. `keys[i]` are the tokens of `pages[i]`."""

    keys: list[PageKey]
    pages: list[int]
    parent: Node | None
    children: dict[PageKey, Node] = field(default_factory=dict)
    # Locked paths that end at or below this node.
    users: int = 0
    last_use: int = 0
    # Whether it is in the cache's heap.
    is_queued: bool = False
    # Names of the pages, if they are recorded.
    names: list[PageName] = field(default_factory=list)


class RadixCache(PrefixCache):
    """A radix tree. `record`: notes pages stored and evicted; None: no events are published."""

    remembers = True

    def __init__(self, page_size: int, record: BlockRecord | None = None) -> None:
        super().__init__()
        self.page_size = page_size
        self._record = record
        self._root = Node([], [], None)
        self._uses = 0
        # (last use, number, node): nodes that were evictable when they were queued.
        self._evictable: list[tuple[int, int, Node]] = []
        self._num_queued = 0

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        node, pages = self._walk(split_pages(tokens, self.page_size))
        return PrefixMatch(pages, node if pages else None)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[PrefixMatch, list[int]]:
        keys = split_pages(tokens, self.page_size)
        assert len(keys) == len(pages), f"{len(tokens)} tokens do not fill {len(pages)} pages"
        node, held = self._walk(keys)
        known = len(held)
        if known < len(keys):
            leaf = Node(keys[known:], list(pages[known:]), node, last_use=self._uses)
            node.children[leaf.keys[0]] = leaf
            self.num_pages += len(leaf.pages)
            self._queue(leaf)
            if self._record is not None:
                behind = node.names[-1] if node.names else b""
                leaf.names = list(page_names(leaf.keys, behind))
                self._record.stored(leaf.names, behind, leaf.keys, GPU)
            node = leaf
        match = PrefixMatch(held + list(pages[known:]), node if keys else None)
        return match, [given for given, own in zip(pages[:known], held, strict=True) if given != own]

    def lock(self, handle: Node | None) -> None:
        for node in self._path(handle):
            if node.users == 0:
                self._num_locked_pages += len(node.pages)
            node.users += 1

    def unlock(self, handle: Node | None) -> None:
        for node in self._path(handle):
            assert node.users > 0, "unlocked more often than locked"
            node.users -= 1
            if node.users == 0:
                self._num_locked_pages -= len(node.pages)
                self._queue(node)

    def evict(self, num_pages: int) -> list[Evicted]:
        evicted: list[Evicted] = []
        while self._evictable and num_pages > 0:
            last_use, _, node = heapq.heappop(self._evictable)
            node.is_queued = False
            if last_use != node.last_use:
                self._queue(node)
                continue
            if node.children or node.users:
                # The node is queued again when it loses its last child or user.
                continue
            path = [*self._path(node)]
            evicted.append(Evicted([key for n in reversed(path) for key in n.keys], node.pages))
            num_pages -= len(node.pages)
            self.num_pages -= len(node.pages)
            parent = node.parent
            assert parent is not None
            del parent.children[node.keys[0]]
            self._queue(parent)
            if self._record is not None:
                self._record.removed(node.names, GPU)
        return evicted

    def check(self) -> None:
        nodes = list(self._nodes())
        pages = [p for n in nodes for p in n.pages]
        assert len(pages) == len(set(pages)), "a page is in the tree twice"
        assert len(pages) == self.num_pages
        assert self._record is None or all(len(n.names) == len(n.pages) for n in nodes), "a page has no name"
        assert sum(len(n.pages) for n in nodes if n.users) == self._num_locked_pages
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.keys[0]] is node
            assert node.parent is self._root or node.parent.users >= node.users
            assert node.is_queued or node.children or node.users, "an unused leaf will never be evicted"

    def _queue(self, node: Node) -> None:
        if node is not self._root and not (node.is_queued or node.children or node.users):
            node.is_queued = True
            self._num_queued += 1
            heapq.heappush(self._evictable, (node.last_use, self._num_queued, node))

    def _walk(self, keys: list[PageKey]) -> tuple[Node, list[int]]:
        """Follow `keys` as far as the tree reaches, split an edge that matches in part, and mark the path as used."""
        self._uses += 1
        node, pages = self._root, list[int]()
        while len(pages) < len(keys) and (child := node.children.get(keys[len(pages)])) is not None:
            rest = keys[len(pages) : len(pages) + len(child.keys)]
            common = next((i for i, (a, b) in enumerate(zip(rest, child.keys, strict=False)) if a != b), len(rest))
            if common < len(child.keys):
                child = self._split(child, common)
            child.last_use = self._uses
            pages.extend(child.pages)
            node = child
        return node, pages

    def _split(self, node: Node, at: int) -> Node:
        """Split an edge in two. `node` keeps the lower part, so that handles to it still stand for the whole path."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.keys[:at], node.pages[:at], parent, users=node.users, last_use=node.last_use)
        upper.names, node.names = node.names[:at], node.names[at:]
        parent.children[upper.keys[0]] = upper
        node.keys, node.pages, node.parent = node.keys[at:], node.pages[at:], upper
        upper.children[node.keys[0]] = node
        return upper

    def _path(self, handle: Node | None) -> Iterator[Node]:
        node = handle
        while isinstance(node, Node) and node is not self._root:
            yield node
            node = node.parent

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
