"""The index that events make: prefixes found by tokens, media, the order of removals."""

from hypothesis import given
from hypothesis import strategies as st

from splitserve.cache.kv_events import block_hash, page_names
from splitserve.cache.prefix import split_pages
from splitserve.observe.events.schema import AllBlocksCleared, BlockIndex, BlockRemoved, BlockStored, joined

SIZE = 2


def chain(tokens):
    """Hashes of the whole blocks of `tokens`."""
    return [block_hash(name) for name in page_names(split_pages(tokens, SIZE))]


def stored(tokens, medium="GPU"):
    names = chain(tokens)
    return BlockStored(names, None, list(tokens[: len(names) * SIZE]), SIZE, medium=medium)


def test_a_block_is_named_by_all_tokens_up_to_its_end():
    assert chain([1, 2, 3, 4])[1] != chain([9, 9, 3, 4])[1]
    assert chain([1, 2, 3, 4])[0] == chain([1, 2])[0]
    assert all(-(2**63) <= name < 2**63 for name in chain(range(40)))


def test_a_prompt_matches_as_far_as_its_blocks_are_held():
    index = BlockIndex()
    index.apply(stored([1, 2, 3, 4, 5, 6]))
    assert index.match([1, 2, 3, 4, 9, 9], SIZE) == 4
    assert index.match([1, 2, 3], SIZE) == 2
    assert index.match([3, 4], SIZE) == 0


def test_blocks_stored_behind_a_known_one_are_found():
    index = BlockIndex()
    index.apply(stored([1, 2]))
    first, second = chain([1, 2, 3, 4])
    index.apply(BlockStored([second], first, [3, 4], SIZE))
    assert index.match([1, 2, 3, 4], SIZE) == 4


def test_a_block_is_gone_when_it_lies_nowhere():
    index = BlockIndex()
    index.apply(stored([1, 2]))
    index.apply(stored([1, 2], medium="CPU_PINNED"))
    [name] = chain([1, 2])
    index.apply(BlockRemoved([name], medium="GPU"))
    assert index.blocks() == {name: frozenset({"CPU_PINNED"})}
    assert index.match([1, 2], SIZE) == 2
    index.apply(BlockRemoved([name], medium="CPU_PINNED"))
    assert len(index) == index.match([1, 2], SIZE) == 0
    index.apply(BlockRemoved([name, 12345]))


def test_cleared_means_empty():
    index = BlockIndex()
    index.apply(stored([1, 2, 3, 4]))
    index.apply(AllBlocksCleared())
    assert len(index) == index.match([1, 2], SIZE) == 0


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(st.lists(st.tuples(TOKENS, st.sampled_from(["GPU", "CPU_PINNED"]), st.booleans()), max_size=12), TOKENS)
def test_it_is_what_a_plain_set_of_prefixes_says(steps, prompt):
    index, held = BlockIndex(), set()
    for tokens, medium, removes in steps:
        names = chain(tokens)
        if removes and names:
            # As in caches, descendants of a block are removed before it.
            behind = {(n, m) for n, m, path in held if m == medium and path[: len(names)] == tuple(names)}
            index.apply(BlockRemoved([n for n, _ in behind], medium=medium))
            held = {entry for entry in held if entry[:2] not in behind}
        else:
            index.apply(stored(tokens, medium))
            held |= {(name, medium, tuple(names[: i + 1])) for i, name in enumerate(names)}
    known = {name for name, _, _ in held}
    expected = 0
    for name in chain(prompt):
        if name not in known:
            break
        expected += SIZE
    assert index.match(prompt, SIZE) == expected
    copy = BlockIndex()
    copy.replace(joined(index.as_events()))
    assert copy.blocks() == index.blocks()
    assert copy.match(prompt, SIZE) == expected
