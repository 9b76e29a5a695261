"""Grammars in processes of their own: budgets end one request, or one grammar, and nothing else waits."""

import functools
import threading
import time

import numpy as np
import psutil
import pytest

from splitserve.api.tokenizer import Tokenizer
from splitserve.core.errors import EngineError, GrammarBudgetError, InvalidRequestError
from splitserve.core.grammar import GrammarBudget, GrammarKind, GrammarSpec
from splitserve.engine.grammar_host import GrammarHost
from support.tiny_models import make_tiny_model

EOS, VOCAB_SIZE = 258, 300
TIMEOUT = 60.0
# Steps of 0.02 s are far above those of a usual grammar, and an ambiguous one soon takes more.
TIGHT = GrammarBudget(step=0.02, compile=0.2)
SHORT = GrammarBudget(step=100.0, request=0.1)
AMPLE = GrammarBudget(step=20.0)
# Each token multiplies the ways in which the output can be read.
AMBIGUOUS = """
root ::= (a | b | a a | b b | root root)
a ::= "a" | "aa" | root "a"
b ::= "b" | "a" | "ab"
"""
# Seconds and tens of MiB to compile.
BOMB = GrammarSpec(GrammarKind.REGEX, "|".join(f"x{i}[a-z]{{1,{i}}}" for i in range(1, 200)))
LETTERS = GrammarSpec(GrammarKind.REGEX, "[a-z]+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def new_host(folder):
    hosts = []

    def make(budget: GrammarBudget, wake=lambda: None) -> GrammarHost:
        hosts.append(GrammarHost(folder, VOCAB_SIZE, frozenset([EOS]), budget, wake))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


@pytest.fixture(scope="module")
def shared_host(new_host):
    """The host of all tests with the same budget: the start of a server takes seconds."""
    return functools.cache(new_host)


def grammar_processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def first_allowed(matcher) -> int:
    words = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    assert matcher.fill_bitmask(words.data, TIMEOUT)
    bits = np.unpackbits(words.view(np.uint8), count=VOCAB_SIZE, bitorder="little")
    return int(np.flatnonzero(bits)[0])


def advance_until_failed(matcher, most: int = 500) -> int:
    """Return the number of tokens until the matcher fails."""
    for count in range(most):
        try:
            token = first_allowed(matcher)
        except GrammarBudgetError:
            return count
        assert matcher.accept(token) or matcher.failure is not None
    raise AssertionError(f"{most} tokens within the budget")


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (TIGHT, "allowed are 0.02 s"),
        (SHORT, "and 0.1 s"),
    ],
)
def test_an_ambiguous_grammar_fails_alone_when_it_exceeds_a_budget(shared_host, budget, says):
    host = shared_host(budget)
    other = host.compile(LETTERS).matcher()
    matcher = host.compile(GrammarSpec(GrammarKind.EBNF, AMBIGUOUS)).matcher()
    assert advance_until_failed(matcher) > 5
    assert isinstance(matcher.failure, GrammarBudgetError)
    assert matcher.failure.http_status == 422
    assert says in matcher.failure.message
    assert "--grammar-step-budget" in matcher.failure.message
    assert other.accept(first_allowed(other))
    assert other.failure is None


def test_a_second_matcher_of_the_same_grammar_outlives_one_over_its_budget(shared_host):
    grammar = shared_host(TIGHT).compile(GrammarSpec(GrammarKind.EBNF, AMBIGUOUS))
    first, second = grammar.matcher(), grammar.matcher()
    advance_until_failed(first)
    assert second.accept(first_allowed(second))
    assert second.failure is None
    assert grammar.is_usable


def test_a_call_far_over_its_budget_ends_the_process_alone(shared_host):
    host = shared_host(SHORT)
    grammar = host.compile(GrammarSpec(GrammarKind.EBNF, AMBIGUOUS))
    letter = first_allowed(grammar.matcher())
    # Output of another worker, accepted in one call.
    matcher = grammar.matcher([letter] * 2_000)
    with pytest.raises(GrammarBudgetError, match="ended the process"):
        first_allowed(matcher)
    assert not grammar.is_usable
    assert first_allowed(host.compile(LETTERS).matcher()) >= 0


def test_a_compilation_over_its_budget_is_the_fault_of_the_grammar(shared_host):
    host = shared_host(TIGHT)
    with pytest.raises(GrammarBudgetError, match=r"0\.2 s of CPU time to compile"):
        host.compile(BOMB)
    assert first_allowed(host.compile(LETTERS).matcher()) >= 0


def test_a_compilation_beyond_its_memory_is_the_fault_of_the_grammar(new_host):
    host = new_host(GrammarBudget(memory=12 << 20))
    with pytest.raises(GrammarBudgetError, match="more memory than 12 MiB"):
        host.compile(BOMB)
    assert first_allowed(host.compile(LETTERS).matcher()) >= 0


def test_output_that_came_with_a_request_is_replayed_or_refused(shared_host):
    grammar = shared_host(AMPLE).compile(GrammarSpec(GrammarKind.REGEX, "[a-z]{3}"))
    letter = first_allowed(grammar.matcher())
    assert first_allowed(grammar.matcher([letter, letter])) == letter
    assert first_allowed(grammar.matcher([letter] * 3)) == EOS
    refused = grammar.matcher([letter] * 4)
    with pytest.raises(Exception, match="output position 3"):
        first_allowed(refused)


@pytest.mark.parametrize(
    ("text", "dead_output"),
    [('root ::= "ab" b\nb ::= b "x"', "ab"), ('root ::= "a" x\nx ::= y "1"\ny ::= x "2"', "a")],
)
def test_a_grammar_with_a_dead_end_fails_the_request_that_reaches_it(shared_host, folder, text, dead_output):
    host = shared_host(AMPLE)
    grammar = host.compile(GrammarSpec(GrammarKind.EBNF, text))
    matcher, replayed = grammar.matcher(), grammar.matcher(Tokenizer.load(folder).encode(dead_output))
    for _ in dead_output:
        assert matcher.accept(first_allowed(matcher))
    for dead in (matcher, replayed):
        with pytest.raises(InvalidRequestError, match=f"after {len(dead_output)} tokens of the output no token"):
            first_allowed(dead)
        assert isinstance(dead.failure, InvalidRequestError)
        assert dead.failure.param == "ebnf"
    assert grammar.is_usable


def test_the_scheduler_is_woken_when_a_mask_that_it_waits_for_arrives(new_host):
    woken = threading.Event()
    grammar = new_host(AMPLE, woken.set).compile(LETTERS)
    matcher = grammar.matcher()
    if not matcher.is_ready():
        assert woken.wait(TIMEOUT)
    assert matcher.is_ready()


def test_a_grammar_that_nothing_refers_to_ends_its_process(shared_host):
    host = shared_host(AMPLE)
    other = host.compile(LETTERS)
    before = grammar_processes()
    grammar = host.compile(LETTERS)
    [process] = grammar_processes() - before
    server = process.parent()
    matcher = grammar.matcher()
    del grammar
    assert first_allowed(matcher) >= 0
    assert process.is_running()
    del matcher
    process.wait(TIMEOUT)
    assert server.is_running()
    assert first_allowed(other.matcher()) >= 0


def test_closing_ends_a_compilation_in_progress(new_host):
    host = new_host(GrammarBudget(compile=1000.0))
    errors = []

    def compile_bomb() -> None:
        try:
            host.compile(BOMB)
        except EngineError as error:
            errors.append(error.message)

    thread = threading.Thread(target=compile_bomb)
    thread.start()
    host.close()
    thread.join(TIMEOUT)
    assert errors == ["the worker is shutting down"]


def test_an_order_to_a_server_that_dies_fails_at_once_while_a_grammar_of_it_lives(new_host):
    host = new_host(AMPLE)
    before = grammar_processes()
    living = host.compile(LETTERS)
    [server] = [p for p in grammar_processes() - before if p.ppid() == psutil.Process().pid]
    server.suspend()
    errors = []

    def compile_other() -> None:
        try:
            host.compile(GrammarSpec(GrammarKind.REGEX, "[0-9]+"))
        except EngineError as error:
            errors.append(error.message)

    thread = threading.Thread(target=compile_other, daemon=True)
    thread.start()
    limit = time.monotonic() + TIMEOUT
    while len(host._links) < 2:
        assert time.monotonic() < limit
    server.kill()
    thread.join(TIMEOUT)
    assert errors == ["the grammar server has ended with exit code -9: see the log of the worker"]
    assert first_allowed(living.matcher()) >= 0
    assert first_allowed(host.compile(GrammarSpec(GrammarKind.REGEX, "[0-9]+")).matcher()) >= 0


def test_a_grammar_is_unusable_once_its_idle_process_was_killed(shared_host):
    host = shared_host(AMPLE)
    other = host.compile(LETTERS)
    before = grammar_processes()
    grammar = host.compile(LETTERS)
    [process] = grammar_processes() - before
    assert grammar.is_usable
    process.kill()
    limit = time.monotonic() + TIMEOUT
    while grammar.is_usable:
        assert time.monotonic() < limit
    assert other.is_usable
