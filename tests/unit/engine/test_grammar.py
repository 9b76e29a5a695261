"""Grammars over the real library and a byte tokenizer: what may come next, and what is wrong with a grammar."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from splitserve.core.batch import SampleSpec
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarBudget, GrammarKind, GrammarMatcher, GrammarSpec
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.bitmask import MaskCollector, StepMasks, forbid
from splitserve.engine.grammar_host import GrammarHost
from splitserve.engine.sampler import sample_tokens
from support.tiny_models import make_tiny_model

# The tiny models' tokens: 0-255 are in the order of the byte alphabet, then five special ones. Their logits are padded.
EOS, VOCAB_SIZE = 258, 300
# Seconds for a mask to arrive.
TIMEOUT = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@contextmanager
def open_host(folder, eos_token_ids: frozenset[int]) -> Iterator[GrammarHost]:
    # What these tests compute is small, so only a defect exceeds the budget.
    budget = GrammarBudget(compile=60, step=20, request=60)
    host = GrammarHost(folder, VOCAB_SIZE, eos_token_ids, budget, lambda: None)
    try:
        yield host
    finally:
        host.close()


@pytest.fixture(scope="module")
def compiler(folder) -> Iterator[GrammarHost]:
    with open_host(folder, frozenset([EOS])) as host:
        yield host


@pytest.fixture(scope="module")
def encode(folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def matcher(compiler, kind: str, text: str, **more) -> GrammarMatcher:
    return compiler.compile(GrammarSpec(GrammarKind(kind), text, **more)).matcher()


def allowed(grammar: GrammarMatcher) -> set[int]:
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    assert grammar.fill_bitmask(words.data, TIMEOUT)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), count=VOCAB_SIZE, bitorder="little")).tolist())


def accepts(grammar: GrammarMatcher, tokens: list[int]) -> bool:
    return all(bool(allowed(grammar)) and grammar.accept(token) for token in tokens)


def spec_of(grammar: GrammarMatcher | None, output=(), **params) -> SampleSpec:
    return SampleSpec(ResolvedSampling(**{"temperature": 0.0} | params), 5, [1, 2], list(output), grammar=grammar)


def test_only_what_continues_the_grammar_may_come_and_at_its_end_only_the_end(compiler, encode):
    grammar = matcher(compiler, "regex", "ab|ac")
    assert allowed(grammar) == set(encode("a"))
    assert accepts(grammar, encode("a"))
    assert allowed(grammar) == set(encode("bc"))
    assert not accepts(grammar, encode("z"))
    assert accepts(grammar, encode("c"))
    assert allowed(grammar) == {EOS}
    assert not grammar.is_terminated()
    assert grammar.accept(EOS)
    assert grammar.is_terminated()
    assert not grammar.accept(*encode("a"))


def test_special_and_padded_tokens_never_come_inside_a_text(compiler):
    tokens = allowed(matcher(compiler, "regex", "[^a]+"))
    assert len(tokens) > 100
    assert max(tokens) < 256


def test_a_strict_schema_takes_no_property_that_it_does_not_name(compiler, encode):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    extra = encode('{"a": 1, "b": 2}')
    assert not accepts(matcher(compiler, "json_schema", schema), extra)
    assert accepts(matcher(compiler, "json_schema", schema, strict=False), extra)


def test_whitespace_in_json_is_bounded(compiler, encode):
    grammar = matcher(compiler, "json_schema", '{"type": "array", "items": {"type": "null"}}')
    assert accepts(grammar, encode("[" + " " * 16))
    assert not accepts(grammar, encode(" "))


def test_a_model_without_an_end_token_ends_with_the_grammar(folder, encode):
    with open_host(folder, frozenset()) as host:
        grammar = matcher(host, "regex", "ab")
        assert accepts(grammar, encode("ab"))
        assert grammar.is_terminated()


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        ("json_schema", '{"type": "strin"}', 'Unsupported type "strin"'),
        ("json_schema", '{"$ref": "#/$defs/x"}', "Cannot find field"),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "minimum greater than maximum"),
        ("json_schema", '{"anyOf": []}', "allows no output"),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "allows no output"),
        ("regex", "(a", "parenthesis is not closed"),
        ("regex", "(?=a)b", "Lookahead is not supported"),
        ("ebnf", "root ::= nothing", 'Rule "nothing" is not defined'),
        ("ebnf", "hello", "root"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "no"}}', "structural_tag"),
    ],
)
def test_a_grammar_at_fault_is_the_clients_error_and_says_what_is_wrong(compiler, kind, text, cause):
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(GrammarSpec(GrammarKind(kind), text))
    assert caught.value.param == kind
    assert cause in caught.value.message
    assert ".cc:" not in caught.value.message


def wait_for(specs):
    for spec in specs:
        assert spec.grammar is None or allowed(spec.grammar)


def bitmask_of(specs):
    wait_for(specs)
    bitmask = StepMasks(MaskCollector(VOCAB_SIZE, frozenset([EOS])), specs).rows(slice(None))
    assert bitmask is not None
    return bitmask


def test_only_rows_with_a_grammar_are_masked_and_the_logits_are_left_alone(compiler, encode):
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB_SIZE)
    before = logits.clone()
    specs = [spec_of(None), spec_of(matcher(compiler, "regex", "[xyz]+")), spec_of(None)]
    masked = forbid(logits, specs, bitmask_of(specs))
    assert torch.equal(logits, before)
    assert torch.equal(masked[[0, 2]], before[[0, 2]])
    assert set(torch.isfinite(masked[1]).nonzero()[:, 0].tolist()) == set(encode("xyz"))


@pytest.mark.parametrize("vocab_size", [33, 63, 64, 261, 288])
@pytest.mark.parametrize("num_allowed", [0, 1, "all"])
def test_masks_change_no_other_row_whatever_the_size_of_the_vocabulary(vocab_size, num_allowed):
    """A row that allows all tokens has a late mask."""
    num_rows, count = 4, vocab_size if num_allowed == "all" else num_allowed
    bits = np.zeros((num_rows, -(-vocab_size // 32) * 32), dtype=np.uint8)
    bits[:, :count] = 1
    logits = torch.zeros(num_rows, vocab_size)
    specs = [spec_of(object() if row != 1 else None) for row in range(num_rows)]
    masked = forbid(logits, specs, np.packbits(bits, axis=-1, bitorder="little").view(np.int32))
    num_left = torch.isfinite(masked).sum(-1).tolist()
    assert num_left == [count, vocab_size, count, count]


def test_a_step_without_a_grammar_has_no_bitmask():
    assert StepMasks(MaskCollector(VOCAB_SIZE, frozenset([EOS])), [spec_of(None)]).rows(slice(None)) is None


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.5, "seed": 4}, {"temperature": 1.0, "top_k": 1}, {"top_p": 0.1}]
)
def test_a_drawn_token_is_allowed_however_it_is_drawn_and_biased(compiler, encode, params):
    torch.manual_seed(1)
    logits = torch.randn(8, VOCAB_SIZE)
    logits[:, encode("a")] = 50.0
    grammar = matcher(compiler, "regex", "[xyz]+")
    specs = [spec_of(grammar, logit_bias={encode("b")[0]: 100.0}, **params)] * 8
    assert set(sample_tokens(logits, specs, frozenset([EOS]), bitmask_of(specs))) <= set(encode("xyz"))


def test_parts_of_a_step_get_the_rows_that_are_theirs(compiler, encode):
    grammars = [matcher(compiler, "regex", text) for text in ("a", "b", "c", "d")]
    specs = [spec_of(grammar) for grammar in grammars]
    wait_for(specs)
    filled = StepMasks(MaskCollector(VOCAB_SIZE, frozenset([EOS])), specs)
    logits = torch.zeros(4, VOCAB_SIZE)
    drawn = [
        sample_tokens(logits[part], specs[part], frozenset([EOS]), filled.rows(part))
        for part in (slice(0, 3), slice(3, 6))
    ]
    assert drawn == [encode("abc"), encode("d")]


@pytest.mark.parametrize(
    ("text", "params", "may_end"),
    [
        ("a*", {}, True),
        ("a*", {"min_new_tokens": 1}, False),
        ("a*", {"ignore_eos": True}, False),
        ("a", {"min_new_tokens": 5}, True),
        ("a", {"ignore_eos": True}, True),
    ],
)
def test_an_end_that_is_not_wanted_comes_only_where_nothing_else_can(compiler, encode, text, params, may_end):
    grammar = matcher(compiler, "regex", text)
    output = encode("a") if text == "a" else []
    assert accepts(grammar, output)
    [row] = bitmask_of([spec_of(grammar, output, **params)])
    assert bool(row[EOS // 32] >> (EOS % 32) & 1) == may_end


def test_a_stop_token_waits_for_min_tokens(compiler, encode):
    grammar = matcher(compiler, "regex", "[ab]+")
    [stop] = encode("b")
    [row] = bitmask_of([spec_of(grammar, [], stop_token_ids=(stop,), min_new_tokens=3)])
    assert not row[stop // 32] >> (stop % 32) & 1
    assert row[encode("a")[0] // 32] >> (encode("a")[0] % 32) & 1
