"""Fifty JSON schemas on a tiny model: what random weights write under a grammar parses, validates, and is the same in
every mode."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from splitserve.core.config import ModelConfig
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.messages import GenerateRequest
from splitserve.core.request import FinishType
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.grammar_process import XGrammarCompiler
from splitserve.engine.loader import LoadedModel, load_model
from support.local_grammar import LocalCompiler
from support.pair import PairWorld
from support.real_engine import real_engine
from support.sim import ColocatedWorld
from support.tiny_models import make_tiny_model

SCHEMAS = json.loads((Path(__file__).parents[1] / "process" / "json_schemas.json").read_text())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")
    return load_model(ModelConfig(model=str(folder), dtype="float32", device="cpu", threads=1))


@pytest.fixture(scope="module")
def settings(loaded):
    return {
        "num_pages": 2048,
        "page_size": 16,
        "max_running": 25,
        "token_budget": 256,
        "eos_token_ids": loaded.eos_token_ids,
        "make_engine": real_engine(loaded),
        "grammar_compiler": LocalCompiler(XGrammarCompiler(loaded.folder, loaded.vocab_size, loaded.eos_token_ids)),
    }


def request(number: int) -> GenerateRequest:
    """Greedy and seeded ones in turn, some with logprobs."""
    params = ResolvedSampling(
        max_new_tokens=600,
        temperature=0.0 if number % 3 == 0 else 1.0,
        seed=number,
        # Against bytes that print as nothing: a random model would fill every gap with them.
        logit_bias=dict.fromkeys(range(188, 256), -20.0),
        grammar=GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMAS[number])),
    )
    return GenerateRequest(
        rid=f"r{number}", prompt_ids=[number, 7, 9] * (number + 1), params=params, return_logprob=number % 2 == 0
    )


def test_fifty_schemas_parse_validate_and_are_the_same_in_every_mode_and_under_memory_pressure(loaded, settings):
    tokenizer = Tokenizer.from_file(str(loaded.folder / "tokenizer.json"))
    one = ColocatedWorld(**settings)
    pair = PairWorld(5, prefill_settings=settings, decode_settings=settings, num_slots=32)
    for number in range(len(SCHEMAS)):
        message = request(number)
        one.submit(message)
        pair.submit(
            message.rid, message.prompt_ids, message.params, room=number + 1, return_logprob=message.return_logprob
        )
    one.run_until_idle()
    pair.run_until_idle(max_events=2_000_000)
    for number, schema in enumerate(SCHEMAS):
        rid = f"r{number}"
        tokens = one.tokens(rid)
        assert one.finish(rid).type is FinishType.STOP, tokenizer.decode(tokens)
        jsonschema.Draft202012Validator(schema).validate(json.loads(tokenizer.decode(tokens)))
        assert pair.decode.tokens(rid) == tokens
        assert pair.decode.finish(rid) == one.finish(rid)
        logprobs = [lp.token_id for output in one.outputs[rid] for lp in output.logprobs]
        assert logprobs == (tokens if number % 2 == 0 else [])
    one.check_nothing_is_held()
    pair.check_nothing_is_held()

    # The pool is so small that requests are retracted: to host memory, or to be computed again.
    for host_memory in (1 << 30, 0):
        tight = settings | {"num_pages": 49, "num_reserved_decode_tokens": 1, "host_memory": host_memory}
        pressed = ColocatedWorld(**tight)
        pressed_pair = PairWorld(6, prefill_settings=settings, decode_settings=tight, num_slots=32)
        for number in range(len(SCHEMAS)):
            message = request(number)
            pressed.submit(message)
            pressed_pair.submit(message.rid, message.prompt_ids, message.params, room=number + 1)
        pressed.run_until_idle()
        pressed_pair.run_until_idle(max_events=2_000_000)
        for worker in (pressed, pressed_pair.decode):
            assert worker.scheduler.state().num_retracted_requests_total > 0
            for number in range(len(SCHEMAS)):
                assert worker.tokens(f"r{number}") == one.tokens(f"r{number}")
        pressed.check_nothing_is_held()
        pressed_pair.check_nothing_is_held()
