"""Events of a recorded cache and its host tier: an index that applies them has exactly the blocks of both."""

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.cache.host_memory import HostMemory, HostTier
from splitserve.cache.kv_events import BlockRecord, block_hash, page_names
from splitserve.cache.prefix import RadixCache, split_pages
from splitserve.observe.events.schema import CPU_PINNED, GPU, AllBlocksCleared, BlockIndex, BlockRemoved, BlockStored

PAGE = 2


class Pool:
    bytes_per_page = 1

    def bytes_of(self, pages):
        return len(pages)

    def save(self, pages):
        return list(pages)

    def restore(self, copy, first, pages):
        pass

    def drop(self, copy):
        pass


class World:
    """A recorded cache, a host tier of `num_host_pages` below it, and an index that follows both."""

    def __init__(self, num_host_pages=8):
        self.record = BlockRecord(PAGE)
        self.cache = RadixCache(PAGE, self.record)
        self.tier = HostTier(HostMemory(Pool(), num_host_pages), PAGE, self.record)
        self.follower = BlockIndex()
        # All tokens up to the end of each page that the cache owns.
        self.on_device: dict[int, tuple[int, ...]] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._pages = count()

    def insert(self, tokens):
        pages = [next(self._pages) for _ in range(len(tokens) // PAGE)]
        match, back = self.cache.insert(tokens[: len(pages) * PAGE], pages)
        ends = [tuple(tokens[: (i + 1) * PAGE]) for i in range(len(pages))]
        self.on_device |= {page: end for page, end in zip(pages, ends, strict=True) if page not in back}
        self._seen |= set(ends)
        return match

    def evict(self, num_pages, *, keeps=True):
        for evicted in self.cache.evict(num_pages):
            for page in evicted.pages:
                del self.on_device[page]
            if keeps:
                self.tier.keep(evicted)

    def publish(self):
        events = self.record.take_news()
        for event in events:
            self.follower.apply(event)
        return events

    def held(self):
        """Hashes and media of the blocks in the cache and on the host."""
        blocks = {last_hash(tokens): {GPU} for tokens in self.on_device.values()}
        for tokens in self._seen:
            if self.tier.find(tokens, len(tokens) // PAGE - 1):
                blocks.setdefault(last_hash(tokens), set()).add(CPU_PINNED)
        return blocks


def hashes(tokens):
    return [block_hash(name) for name in page_names(split_pages(tokens, PAGE))]


def last_hash(tokens):
    return hashes(tokens)[-1]


prompts = st.lists(st.integers(0, 1), max_size=6 * PAGE)
lives = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["insert", "insert", "lock"]), prompts),
        st.tuples(st.sampled_from(["unlock", "evict", "evict", "forget"]), st.integers(1, 6)),
        st.tuples(st.sampled_from(["flush", "publish", "publish"]), st.none()),
    ),
    max_size=60,
)


@given(lives, st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_a_follower_has_the_blocks_that_are_held(life, num_host_pages):
    world = World(num_host_pages)
    locked = []
    for action, argument in life:
        match action:
            case "insert":
                world.insert(argument)
            case "lock":
                locked.append(world.insert(argument).handle)
                world.cache.lock(locked[-1])
            case "unlock" if locked:
                world.cache.unlock(locked.pop(argument % len(locked)))
            case "evict" | "forget":
                world.evict(argument, keeps=action == "evict")
            case "flush":
                world.evict(world.cache.num_pages, keeps=False)
                world.tier.clear()
            case "publish":
                world.publish()
                assert world.follower.blocks() == world.held()
        world.cache.check()
    world.publish()
    assert world.follower.blocks() == world.record.blocks() == world.held()
    # An index that loads the whole record gets the same, and finds the same.
    late = BlockIndex()
    late.replace(world.record.whole())
    assert late.blocks() == world.follower.blocks()
    for tokens in world.on_device.values():
        assert late.match(tokens, PAGE) == world.follower.match(tokens, PAGE) == len(tokens)


def test_a_prompt_is_one_event_and_what_follows_it_later_another():
    world = World()
    world.insert([1, 2, 3, 4])
    assert world.publish() == [BlockStored(hashes([1, 2, 3, 4]), None, [1, 2, 3, 4], PAGE, medium=GPU)]
    world.insert([1, 2, 3, 4, 5, 6, 7])
    first, second, third = hashes([1, 2, 3, 4, 5, 6])
    assert world.publish() == [BlockStored([third], second, [5, 6], PAGE, medium=GPU)]
    world.insert([1, 2, 3, 4])
    assert world.publish() == []
    assert first != second


def test_what_is_evicted_to_the_host_moves_there_and_from_there_goes():
    world = World(num_host_pages=2)
    world.insert([1, 1, 2, 2])
    world.insert([3, 3])
    world.publish()
    world.evict(1)
    names = hashes([1, 1, 2, 2])
    assert world.publish() == [
        BlockRemoved(names, medium=GPU),
        BlockStored(names, None, [1, 1, 2, 2], PAGE, medium=CPU_PINNED),
    ]
    world.evict(1)
    assert world.publish() == [
        BlockRemoved(hashes([3, 3]), medium=GPU),
        BlockRemoved(names, medium=CPU_PINNED),
        BlockStored(hashes([3, 3]), None, [3, 3], PAGE, medium=CPU_PINNED),
    ]


def test_an_empty_cache_is_one_event_that_clears_all():
    world = World()
    world.insert([1, 1, 2, 2])
    world.publish()
    world.insert([3, 3])
    world.evict(3, keeps=False)
    assert world.publish() == [AllBlocksCleared()]
    assert world.publish() == []
