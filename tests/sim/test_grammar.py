"""Requests with a grammar through whole simulated workers: each role applies it, checks it, and fails alone."""

import random

import pytest

from splitserve.core.errors import GrammarBudgetError
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.messages import AbortRequest, GenerateRequest
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from support.fake_grammar import FakeCompiler, FakeMatcher, HeldPool, multiples
from support.pair import PairWorld
from support.sim import ColocatedWorld

EOS = 511
PLAIN = ResolvedSampling(max_new_tokens=8, ignore_eos=True)


def params(step: int, count: int, **more) -> ResolvedSampling:
    return ResolvedSampling(**({"max_new_tokens": 20, "grammar": multiples(step, count)} | more))


def colocated(**settings) -> ColocatedWorld:
    return ColocatedWorld(eos_token_ids=frozenset([EOS]), **settings)


def pair(seed: int, prefill=None, decode=None) -> PairWorld:
    common = {"eos_token_ids": frozenset([EOS])}
    return PairWorld(seed, prefill_settings=common | (prefill or {}), decode_settings=common | (decode or {}))


def follows(tokens: list[int], step: int, count: int) -> bool:
    return len(tokens) == count + 1 and tokens[-1] == EOS and all(t % step == 0 for t in tokens[:-1])


def test_output_follows_the_grammar_and_its_end_ends_the_request_while_others_go_on_as_ever():
    world = colocated()
    world.submit(GenerateRequest(rid="free", prompt_ids=[1, 2, 3], params=PLAIN))
    world.run_until_idle()
    alone = world.tokens("free")
    world.submit(GenerateRequest(rid="free again", prompt_ids=[1, 2, 3], params=PLAIN))
    world.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5)))
    world.run_until_idle()
    assert follows(world.tokens("g"), 7, 5)
    assert world.finish("g").type is FinishType.STOP
    assert world.tokens("free again") == alone
    world.check_nothing_is_held()


@pytest.mark.parametrize("more", [{"min_new_tokens": 15}, {"ignore_eos": True}])
def test_the_end_of_a_grammar_ends_a_request_that_wants_to_go_on(more):
    world = colocated()
    world.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5, **more)))
    world.run_until_idle()
    assert follows(world.tokens("g"), 7, 5)
    assert world.finish("g").type is FinishType.STOP


def test_max_new_tokens_cuts_a_grammar_off():
    world = colocated()
    world.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5, max_new_tokens=3)))
    world.run_until_idle()
    assert len(world.tokens("g")) == 3
    assert world.finish("g").type is FinishType.LENGTH


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_both_sides_apply_the_grammar_in_any_order_of_events(seed, overlapped):
    pools = HeldPool(), HeldPool()
    late = [{"late_steps": random.Random(seed + i)} if overlapped else {} for i in range(2)]
    world = pair(seed, {"grammar_pool": pools[0]} | late[0], {"grammar_pool": pools[1]} | late[1])
    for room in range(1, 6):
        world.submit(f"g{room}", [room] * (10 * room), params(room + 1, room), room=room)
        world.submit(f"free{room}", [room] * 5, PLAIN, room=100 + room)
    for _ in range(world.rng.randrange(400)):
        world.happen()
    pools[world.rng.randrange(2)].finish_all()
    for _ in range(world.rng.randrange(400)):
        world.happen()
    for _ in range(100):
        for pool in pools:
            pool.finish_all()
        for _ in range(200):
            world.happen()
    world.run_until_idle()
    for room in range(1, 6):
        assert follows(world.decode.tokens(f"g{room}"), room + 1, room)
        assert len(world.decode.tokens(f"free{room}")) == 8
    world.check_nothing_is_held()


def test_a_first_token_that_the_decode_sides_grammar_refuses_fails_that_request_alone():
    class Lax(FakeCompiler):
        """The prefill side understands the grammar as another one."""

        def compile(self, spec):
            return super().compile(multiples(1, 9))

    world = pair(3, {"grammar_compiler": Lax(frozenset([EOS]))})
    # The fake engine chooses among the allowed tokens by the prompt: a multiple of 5 here, then another number.
    prompts = {f"r{i}": [i, i + 1, i + 2] for i in range(12)}
    for room, (rid, prompt) in enumerate(prompts.items(), start=1):
        world.submit(rid, prompt, params(5, 2), room=room)
    world.run_until_idle()
    refused = [rid for rid in prompts if world.decode.finish(rid).type is FinishType.ABORT]
    assert 0 < len(refused) < len(prompts)
    for rid in prompts:
        if rid not in refused:
            assert follows(world.decode.tokens(rid), 5, 2)
            continue
        finish = world.decode.finish(rid)
        assert world.decode.tokens(rid) == []
        assert (finish.status_code, finish.reason) == (500, "grammar_refused_token")
        assert rid in finish.message
        assert "stage 'transfer'" in finish.message
        assert "same version" in finish.message
    world.check_nothing_is_held()


def test_a_token_the_engine_should_never_have_drawn_fails_its_request_on_either_side():
    class Broken(FakeCompiler):
        def compile(self, spec):
            grammar = super().compile(spec)
            make = grammar.matcher

            def matcher(output_ids=()):
                made = make(output_ids)
                made.accept = lambda token: False
                return made

            grammar.matcher = matcher
            return grammar

    world = colocated(grammar_compiler=Broken(frozenset([EOS])))
    world.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5)))
    world.submit(GenerateRequest(rid="free", prompt_ids=[1, 2, 3], params=PLAIN))
    world.run_until_idle()
    assert world.finish("g").reason == "grammar_refused_token"
    assert len(world.tokens("free")) == 8
    world.check_nothing_is_held()

    both = pair(1, {"grammar_compiler": Broken(frozenset([EOS]))})
    both.submit("g", [1, 2, 3], params(7, 5), room=1)
    both.run_until_idle()
    assert both.prefill.finish("g").reason == "grammar_refused_token"
    assert both.decode.finish("g").type is FinishType.ABORT
    both.check_nothing_is_held()


def test_an_invalid_grammar_is_the_clients_fault_and_nothing_is_paired():
    bad = ResolvedSampling(grammar=GrammarSpec(GrammarKind.REGEX, "nonsense"))
    world = pair(1)
    world.submit("bad", [1, 2, 3], bad, room=1)
    world.prefill.turn()
    world.decode.turn()
    for worker in (world.prefill, world.decode):
        finish = worker.finish("bad")
        assert (finish.status_code, finish.reason, finish.param) == (400, "invalid_request", "regex")
        assert "request bad ended in stage 'grammar'" in finish.message
    assert world.prefill.manager.num_rooms == world.decode.manager.num_rooms == 0
    world.check_nothing_is_held()


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_a_deadline_on_one_side_is_told_to_the_other(slow):
    world = pair(1, **{slow: {"grammar_pool": HeldPool()}})
    world.submit("g", [1, 2, 3], params(2, 2), room=1)
    late, other = (world.prefill, world.decode) if slow == "prefill" else (world.decode, world.prefill)
    for _ in range(200):
        world.happen()
    assert late.scheduler.state().num_grammar_queue_reqs == 1
    assert late.finish("g") is None
    world.clock.advance(60.0)
    began = world.clock.now()
    world.run_until_idle()
    assert (late.finish("g").status_code, late.finish("g").reason) == (504, "deadline_exceeded")
    assert "stage 'grammar'" in late.finish("g").message
    assert other.finish("g").type is FinishType.ABORT
    assert world.clock.now() - began < 5.0
    world.check_nothing_is_held()


@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_a_timeout_that_comes_while_the_grammar_is_compiled_ends_both_halves(slow):
    world = pair(1, **{slow: {"grammar_pool": HeldPool()}})
    world.submit("g", [1, 2, 3], params(2, 2), room=1, timeout=10.0)
    late, other = (world.prefill, world.decode) if slow == "prefill" else (world.decode, world.prefill)
    for _ in range(200):
        world.happen()
    assert late.scheduler.state().num_grammar_queue_reqs == 1
    world.clock.advance(10.0)
    world.run_until_idle()
    assert (late.finish("g").status_code, late.finish("g").reason) == (504, "deadline_exceeded")
    assert "timeout of 10 s" in late.finish("g").message
    assert other.finish("g").type is FinishType.ABORT
    assert late.scheduler.state().num_grammar_queue_reqs == 0
    world.check_nothing_is_held()


def test_requests_that_gave_way_go_on_in_their_grammars():
    # No reserve, and room for one and a half requests.
    tight = {"num_pages": 8, "page_size": 4, "num_reserved_decode_tokens": 1}
    for host_memory in (1 << 30, 0):
        one = colocated(**tight, host_memory=host_memory)
        both = pair(3, decode=tight | {"host_memory": host_memory})
        for i in range(6):
            one.submit(GenerateRequest(rid=f"g{i}", prompt_ids=[4, 5, i], params=params(7, 15)))
            both.submit(f"g{i}", [4, 5, i], params(7, 15), room=i + 1)
        one.run_until_idle()
        both.run_until_idle()
        for worker in (one, both.decode):
            assert worker.scheduler.state().num_retracted_requests_total >= 3
            assert all(follows(worker.tokens(f"g{i}"), 7, 15) for i in range(6))
            assert all(worker.tokens(f"g{i}") == one.tokens(f"g{i}") for i in range(6))
        one.check_nothing_is_held()
        both.check_nothing_is_held()


@pytest.mark.parametrize("quiet", [True, False])
def test_a_request_can_be_aborted_while_its_grammar_is_compiled(quiet):
    pool = HeldPool()
    world = colocated(grammar_pool=pool)
    world.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5)))
    world.turn()
    assert not world.is_idle()
    world.submit(AbortRequest(rid="g", quiet=quiet))
    world.turn()
    assert world.is_idle()
    assert (world.finish("g") is None) == quiet
    pool.finish_all()
    world.run_until_idle()
    world.check_nothing_is_held()


def test_requests_without_a_grammar_do_not_wait_behind_one():
    world = colocated(grammar_pool=HeldPool())
    world.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5)))
    world.submit(GenerateRequest(rid="free", prompt_ids=[1, 2, 3], params=PLAIN))
    for _ in range(20):
        world.turn()
    assert len(world.tokens("free")) == 8
    assert world.finish("g") is None


class SlowCompiler(FakeCompiler):
    """Its matchers have no mask after `num_quick` tokens until a test sets `is_slow` to False."""

    def __init__(self, num_quick: int, *, is_expected: bool = False) -> None:
        super().__init__(frozenset([EOS]))
        self._num_quick = num_quick
        self._is_expected = is_expected
        self.matchers: list[FakeMatcher] = []

    def compile(self, spec):
        grammar = super().compile(spec)
        make = grammar.matcher

        def matcher(output_ids=()):
            made = make(output_ids)
            accept = made.accept

            def accept_and_slow_down(token):
                is_accepted = accept(token)
                made.is_slow = made.num_accepted == self._num_quick
                return is_accepted

            made.accept, made.is_expected = accept_and_slow_down, self._is_expected
            made.is_slow = self._num_quick == 0
            self.matchers.append(made)
            return made

        grammar.matcher = matcher
        return grammar


def start_slow_and_free(world: ColocatedWorld) -> None:
    """Run until the free request has ended and the other one waits for a mask."""
    world.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5)))
    world.submit(GenerateRequest(rid="free", prompt_ids=[1, 2, 3], params=PLAIN))
    for _ in range(30):
        world.turn()
    assert len(world.tokens("free")) == 8


@pytest.mark.parametrize("is_expected", [False, True])
@pytest.mark.parametrize("num_quick", [0, 1, 3])
def test_a_request_waits_for_its_mask_alone_and_goes_on_with_the_same_tokens(num_quick, is_expected):
    usual = colocated()
    usual.submit(GenerateRequest(rid="g", prompt_ids=[4, 5], params=params(7, 5)))
    usual.run_until_idle()
    compiler = SlowCompiler(num_quick, is_expected=is_expected)
    world = colocated(grammar_compiler=compiler)
    start_slow_and_free(world)
    assert len(world.tokens("g")) == num_quick
    compiler.matchers[0].is_slow = False
    world.run_until_idle()
    assert world.tokens("g") == usual.tokens("g")
    world.check_nothing_is_held()


@pytest.mark.parametrize("num_quick", [0, 3])
def test_a_request_over_its_grammar_budget_ends_alone_with_422(num_quick):
    compiler = SlowCompiler(num_quick)
    world = colocated(grammar_compiler=compiler)
    start_slow_and_free(world)
    world.submit(GenerateRequest(rid="other", prompt_ids=[8], params=PLAIN))
    compiler.matchers[0].failure = GrammarBudgetError("its grammar is too slow")
    world.run_until_idle()
    finish = world.finish("g")
    assert (finish.status_code, finish.reason) == (422, "grammar_over_budget")
    assert "request g ended" in finish.message
    assert "too slow" in finish.message
    assert len(world.tokens("other")) == 8
    world.check_nothing_is_held()


@pytest.mark.parametrize("slow_half", ["prefill", "decode"])
def test_both_halves_end_when_one_is_over_its_grammar_budget(slow_half):
    compiler = SlowCompiler(0)
    world = pair(2, **{slow_half: {"grammar_compiler": compiler}})
    world.submit("g", [1, 2, 3], params(7, 5), room=1)
    for _ in range(200):
        world.happen()
    compiler.matchers[0].failure = GrammarBudgetError("its grammar is too slow")
    world.run_until_idle()
    for half in (world.prefill, world.decode):
        assert half.finish("g").status_code == 422
        assert "too slow" in half.finish("g").message
    world.check_nothing_is_held()
