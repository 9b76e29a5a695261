"""What a caller may give, and what becomes of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

import splitserve
from splitserve.api.schemas import GenerateBody
from splitserve.api.validation import parse
from splitserve.core.errors import ConfigError, InvalidRequestError, ModelNotFoundError
from splitserve.offline.calls import SamplingParams, is_single, requests_for
from splitserve.offline.engine import Engine, _check_call, own_names, worker_args, worker_config
from splitserve.offline.terms import ENGINE_OPTIONS, PHRASES, engine_terms
from splitserve.server.memory import tags_of
from splitserve.worker.checks import check_worker

CHAT = [{"role": "user", "content": "hi"}]
SOURCE = Path(splitserve.__file__).parent


class Letters:
    """One token a letter; a chat is its contents."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return [1, *self.encode("".join(m["content"] for m in messages))]


def bodies(prompts: Any, sampling: Any = None, logprobs: int | None = None) -> list[dict[str, Any]]:
    found = [r.body(Letters(), stream=False) for r in requests_for(prompts, sampling, logprobs)]
    for body in found:
        parse(GenerateBody, body)
    return found


@pytest.mark.parametrize("one", ["ab", [97, 98], (97, 98), CHAT], ids=repr)
def test_one_prompt_is_told_from_a_list_of_prompts(one):
    assert is_single(one)
    assert not is_single([one])
    assert [b["input_ids"] for b in bodies(one)] == [b["input_ids"] for b in bodies([one])]


def test_texts_ids_and_chats_mix():
    assert [b["input_ids"] for b in bodies(["ab", [5], CHAT])] == [[97, 98], [5], [1, 104, 105]]
    assert bodies([]) == []


def test_every_prompt_has_an_id_of_its_own():
    assert len({b["rid"] for b in bodies(["a"] * 3) + bodies(["a"])}) == 4


def test_sampling_is_for_all_or_one_a_prompt_and_an_object_or_a_dict():
    shared = bodies(["a", "b"], SamplingParams(temperature=0.5, logit_bias={7: 1.0}))
    assert [b["sampling_params"] for b in shared] == [{"temperature": 0.5, "logit_bias": {"7": 1.0}}] * 2
    each = bodies(["a", "b"], [{"regex": "[0-9]+", "logit_bias": {7: 1.0}}, None])
    assert [b["sampling_params"] for b in each] == [{"regex": "[0-9]+", "logit_bias": {"7": 1.0}}, {}]


@pytest.mark.parametrize("number", [None, 0, 3])
def test_logprobs_are_off_the_token_s_own_or_the_likeliest_too(number):
    [body] = bodies("a", None, number)
    assert (body["return_logprob"], body["top_logprobs_num"]) == (number is not None, number or 0)


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"temprature": 1.0}, "temprature is not a field of this request: did you mean temperature?"),
        ({"temperature": "warm"}, "temperature has the type string: give a number"),
        ({1: 2}, "sampling_params.1 is not a field of this request"),
        ({"n": 3}, "n is 3: leave it out, and give the prompt 3 times"),
        ({"n": 0}, "n is 0: leave it out$"),
        ([None, None], "sampling_params is a list of 2 for 1 prompts"),
    ],
)
def test_what_is_wrong_with_the_call_is_raised_before_anything_runs(sampling, told):
    with pytest.raises(InvalidRequestError, match=told):
        requests_for("a", sampling, None)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temprature": 1.0}, "sampling_params.temprature is not a field of this request: did you mean temperature?"),
        ({"temperature": "warm"}, "sampling_params.temperature has the type string: give a number"),
        ({"temperature": []}, "sampling_params.temperature has the type list: give a number$"),
        ({"json_schema": 5}, "json_schema has the type number: give a string or a dict$"),
        ({"stop": {}}, "sampling_params.stop has the type dict: give a string or a list$"),
        ({"ignore_eos": 1}, "sampling_params.ignore_eos has the type number: give True or False$"),
        ({"self": 1}, "sampling_params.self is not a field"),
    ],
)
def test_a_wrong_sampling_parameter_is_an_error_of_ours_and_a_value_error(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as raised:
        SamplingParams(**fields)
    assert isinstance(raised.value, ValueError)
    assert raised.value.param == f"sampling_params.{next(iter(fields))}"


@pytest.mark.parametrize("prompts", [5, None, b"text", {"role": "user", "content": "a"}, iter(["a"])])
def test_what_is_neither_a_prompt_nor_a_list_of_them_is_a_type_error(prompts):
    with pytest.raises(TypeError, match="give a text, a list of token ids"):
        requests_for(prompts, None, None)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (5, r"prompts\[1\] is of type int: give a text, token ids, or chat messages"),
        (5.5, r"prompts\[1\] is of type float: give"),
        (None, r"prompts\[1\] is of type NoneType: give"),
        (b"a", r"prompts\[1\] is of type bytes: give"),
        ([5, "a"], r"prompts\[1\]\[1\] is of type str: give"),
        ([True, 5], r"prompts\[1\]\[0\] is of type bool: give"),
        (["a"], r"prompts\[1\]\[0\] is of type str: give"),
        ([*CHAT, 5], r"prompts\[1\]\[1\] is of type int: give"),
    ],
)
def test_what_is_no_prompt_is_rejected_before_anything_runs(prompt: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        requests_for(["a", prompt], None, None)


@pytest.mark.parametrize("prompt", ["", [], [{"content": "no role"}]])
def test_an_empty_prompt_fails_alone(prompt):
    good, bad = requests_for(["a", prompt], None, None)
    assert good.body(Letters(), stream=True)["input_ids"] == [97]
    with pytest.raises(InvalidRequestError):
        bad.body(Letters(), stream=True)


def test_options_reach_the_config_and_the_command_line_by_the_same_names():
    from typer.testing import CliRunner

    from splitserve.cli import app

    config = worker_config("m", "tcp", {"dtype": "float32", "page_size": 8, "max_running_requests": 3})
    assert (config.model.dtype, config.cache.page_size, config.scheduler.max_running_requests) == ("float32", 8, 3)
    check_worker(config)
    guessing = worker_config("m", "tcp", {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 6})
    assert (guessing.speculative.algorithm, guessing.speculative.num_draft_tokens) == ("ngram", 6)
    plain = worker_config("m", "tcp", {})
    assert (plain.scheduler.overlap_schedule, plain.dp_size) == (True, 1)
    other = worker_config("m", "tcp", {"disable_overlap_schedule": True, "dp_size": 2, "schedule_policy": "lpm"})
    assert (other.scheduler.overlap_schedule, other.dp_size, other.scheduler.schedule_policy) == (False, 2, "lpm")
    assert worker_args({"disable_overlap_schedule": True, "page_size": 8}) == [
        "--disable-overlap-schedule",
        "--page-size=8",
    ]
    assert worker_args({"disable_overlap_schedule": False, "elastic_cores": True, "context_length": None}) == []
    assert worker_args({"elastic_cores": False}) == ["--no-elastic-cores"]
    flags = [arg.partition("=")[0] for arg in worker_args(dict.fromkeys(ENGINE_OPTIONS, 1))]
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert [flag for flag in flags if flag not in known] == []


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"max_new_tokens": 3}, "a call has no argument max_new_tokens: give it in sampling_params"),
        ({"max_tokens": 3}, "a call has no argument max_tokens: did you mean max_new_tokens in sampling_params?"),
        ({"temprature": 3}, "a call has no argument temprature: did you mean temperature in sampling_params?"),
        ({"n": 3}, "a call has no argument n: give the prompt several times, with a seed each"),
        ({"logprob": 2}, "a call has no argument logprob: did you mean logprobs?"),
        ({"xyz": 2}, "a call has no argument xyz: there are logprobs, hidden_states, deadline"),
        ({"deadline": "5"}, "deadline is '5': give a number of seconds above 0"),
        ({"deadline": 0}, "deadline is 0: give a number of seconds above 0"),
    ],
)
def test_an_argument_that_a_call_does_not_have_is_an_error(call, told):
    with pytest.raises(InvalidRequestError, match=re.escape(told)):
        _check_call(call)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_total_token": 4}, "Engine has no option 'max_total_token'; did you mean max_total_tokens?"),
        ({"prefil": 1}, "Engine has no option 'prefil'; did you mean prefill\\? docs/reference/options.md lists"),
        ({"load_timout": 1}, "Engine has no option 'load_timout'; did you mean load_timeout?"),
        ({"temperature": 1}, "Engine has no option 'temperature'; give it in the sampling_params of a call$"),
        ({"port": 1}, "Engine has no option 'port'; docs/reference/options.md lists its options$"),
        ({"max_num_seqs": "1"}, "Engine's option max_num_seqs: Expected `int`, got `str`"),
        ({"context_length": "1"}, "context_length: Expected `int | None`, got `str`".replace("|", r"\|")),
        ({"max_model_len": 0}, "^max_model_len must be at least 1, not 0"),
        ({"enable_dp_attention": True, "data_parallel_size": 1}, "^enable_dp_attention needs data_parallel_size 2"),
        ({"page_size": "16"}, "Engine's option page_size: Expected `int`, got `str`"),
        ({"page_size": 0}, "^page_size must be at least 1"),
        ({"dp_size": 0}, r"^dp_size must be in \[1, 1024\]"),
        ({"schedule_policy": "sfp"}, "^schedule_policy sfp: choose one of fcfs, "),
        ({"speculative_algorithm": "ngrm"}, "^speculative_algorithm ngrm: choose one of .*ngram"),
        ({"prefill": "1", "decode": 1}, "Engine's option prefill: Expected `int`, got `str`"),
        ({"decode": 1.5, "prefill": 1}, "Engine's option decode: Expected `int`, got `float`"),
        ({"load_timeout": "3"}, "Engine's option load_timeout: Expected `float`, got `str`"),
        ({"model_path": "other"}, "Engine's option model is given twice: as 'm', and as model_path 'other'"),
        (
            {"transfer_backend": "tcp"},
            "^transfer_backend applies to the KV transfer between prefill and decode workers: give prefill=1",
        ),
        (
            {"hand_over": True},
            "^hand_over applies to the KV transfer between prefill and decode workers: give prefill=1",
        ),
        ({"disable_overlap_schedule": "yes"}, "disable_overlap_schedule"),
        ({"dtype": "float31"}, "^dtype float31"),
        ({"transfer_backend": "udp", "prefill": 1, "decode": 1}, "^transfer_backend 'udp': choose one of tcp"),
        ({"enable_dp_attention": True}, "^enable_dp_attention needs dp_size 2 or more"),
    ],
)
def test_a_wrong_option_is_named_before_a_process_starts(options, told):
    with pytest.raises(ConfigError, match=told):
        Engine("m", **options)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("start the worker with a larger --max-total-tokens", "create the Engine with a larger max_total_tokens"),
        ("top_logprobs_num is 1000: send 128 at most (--max-top-logprobs)", "logprobs is 1000: give 128 at most"),
        ("--hand-over needs --transfer-backend shm, not tcp", "hand_over needs transfer_backend shm, not tcp"),
        ("stop has the type object: send a string or an array", "stop has the type dict: give a string or a list"),
        ("it was aborted: send it again", "it was aborted: call again"),
    ],
)
def test_errors_name_arguments_of_an_engine(message: str, told: str) -> None:
    error = InvalidRequestError(message, param="input_ids")
    with pytest.raises(InvalidRequestError) as raised, engine_terms():
        raise error
    assert (str(raised.value), raised.value.message, raised.value.param) == (told, told, "prompt")


def test_each_phrase_in_terms_of_servers_is_in_an_error() -> None:
    texts = [
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name != "terms.py"
    ]
    assert not {phrase for phrase in PHRASES if not any(phrase in text for text in texts)}


def test_an_engine_takes_names_of_other_systems():
    assert own_names({"tp": 2, "max_model_len": 100, "page_size": 8}) == {
        "tp_size": 2,
        "context_length": 100,
        "page_size": 8,
    }
    with pytest.raises(ConfigError, match="page_size is given twice: as page_size and as block_size"):
        own_names({"page_size": 8, "block_size": 8})


@pytest.mark.parametrize("counts", [(1, 0), (0, 2), (-1, 1), (1, -1), (-1, -1)])
def test_workers_of_one_kind_alone_are_rejected_by_the_names_of_the_arguments(counts: tuple[int, int]) -> None:
    prefill, decode = counts
    with pytest.raises(ConfigError, match=f"^prefill={prefill}, decode={decode}: give both at least 1"):
        Engine("no model", prefill=prefill, decode=decode)


def test_the_default_model_s_name_does_not_hide_a_second_model() -> None:
    with pytest.raises(ConfigError, match="given twice: as 'smollm2', and as model_path 'other'"):
        Engine("smollm2", model_path="other")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"context_length": 1}, "^context_length 1: too small for a chat request; give 128 or more"),
        ({"max_model_len": 127}, "^max_model_len 127: too small"),
        ({"max_total_tokens": 1}, "^max_total_tokens 1: too small for one request; give 128 or more"),
        ({"context_length": 4097}, "^context_length 4097: .* has positions for 4096 tokens"),
        ({"device": "gpu"}, "^device gpu: choose auto, cpu"),
    ],
)
def test_a_model_that_could_not_serve_is_rejected_before_a_process_starts(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    (tmp_path / "tokenizer.json").touch()
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=told):
        Engine(str(tmp_path), **options)


@pytest.mark.parametrize("model", ["", " ", None, 5])
def test_a_model_without_a_name_is_rejected(model: Any) -> None:
    with pytest.raises(ModelNotFoundError, match="names no model"):
        Engine(model)


def test_a_text_as_sampling_parameters_is_no_list_of_letters() -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params has the type string"):
        requests_for("a", "greedy", None)  # type: ignore[arg-type]


def test_a_text_as_tags_is_no_list_of_letters() -> None:
    with pytest.raises(InvalidRequestError, match="tags: 'weights' is a text"):
        tags_of("weights")
