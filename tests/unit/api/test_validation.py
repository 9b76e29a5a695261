"""Bodies: whatever bytes a client sends, it gets an object or an error of a bounded length that names the problem."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.api.responses import shortened
from splitserve.api.schemas import (
    AbortBody,
    ChatBody,
    CompletionBody,
    GenerateBody,
    MemoryBody,
    NativeSampling,
    RequestModel,
    WeightsBody,
)
from splitserve.api.validation import check_fields, check_rooms, is_batch, parse, parse_object, unknown_fields
from splitserve.core.errors import InvalidRequestError
from splitserve.core.limits import LimitsConfig

LIMITS = LimitsConfig()


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "JSON"),
        (b'{"text": ', "JSON"),
        (b"[1]", "JSON array"),
        (b'"text"', "JSON string"),
        (b"null", "JSON null"),
        (b"1", "JSON number"),
        (b"1.5", "JSON number"),
        (b"true", "JSON boolean"),
        (b'{"a": "\xff"}', "UTF-8|JSON"),
        (b'{"a": "\\ud800"}', "JSON"),
        (b'{"a":' + b"[" * 100_000, "deep|JSON"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64 levels"),
    ],
)
def test_a_body_that_is_no_json_object_is_rejected(raw: bytes, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        parse_object(raw, LIMITS)


def test_a_body_may_have_as_many_levels_as_allowed() -> None:
    assert parse_object(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}", LIMITS)


@given(st.binary())
def test_any_bytes_give_an_object_or_an_error(raw: bytes) -> None:
    try:
        body = parse_object(raw, LIMITS)
    except InvalidRequestError:
        return
    assert msgspec.json.decode(raw) == body


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"rid": "x" * 257}, "rid"),
        ({"rid": ["a", "x" * 257]}, "rid[1]"),
        ({"messages": [{}] * 4097}, "messages"),
        ({"text": ["a"] * 4097}, "text"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1.0 for i in range(1025)}}, "logit_bias"),
        ({"n": 129}, "n"),
        ({"regex": "a" * (1 << 18 | 1)}, "regex"),
        ({"sampling_params": {"stop": ["a"] * 65}}, "sampling_params.stop"),
        ({"stop": ["a", "x" * 1025]}, "stop[1]"),
        ({"sampling_params": {"n": 129}}, "sampling_params.n"),
        (
            {"sampling_params": [{}, {"logit_bias": {str(i): 1.0 for i in range(1025)}}]},
            "sampling_params[1].logit_bias",
        ),
    ],
)
def test_a_field_beyond_its_limit_is_rejected_by_name(body: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_fields(body, LIMITS)
    assert caught.value.param == param
    assert "at most" in caught.value.message
    assert "(--max-" in caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_data", "http://x/a.png"),
        ("image_data", [None, ["data:image/png;base64,AA=="]]),
        ("video_data", [{"url": "http://x"}]),
        ("audio_data", ["http://x"]),
        ("modalities", ["text", "audio"]),
        ("modalities", "image"),
        ("multi_modal_data", {"image": "http://x"}),
    ],
)
def test_media_beside_the_prompt_are_rejected_by_name(name: str, value: object) -> None:
    """SGLang's and vLLM's clients send them so. An answer would be about an image that the model never got."""
    with pytest.raises(InvalidRequestError) as caught:
        check_fields({"text": "What is this?", name: value}, LIMITS)
    assert caught.value.param == name
    assert caught.value.message == f"{name}: this server serves text only; leave the field out"


@pytest.mark.parametrize("value", [None, [], {}, "", [None, None], [[], []]])
@pytest.mark.parametrize("name", ["image_data", "video_data", "audio_data", "modalities", "multi_modal_data"])
def test_fields_for_media_without_media_are_accepted(name: str, value: object) -> None:
    check_fields({name: value}, LIMITS)
    assert unknown_fields({name: value}, ["text"]) == []


@pytest.mark.parametrize("value", ["text", ["text"]])
def test_text_is_an_accepted_modality(value: object) -> None:
    check_fields({"modalities": value}, LIMITS)
    assert unknown_fields({"modalities": value}, ["text"]) == []
    with pytest.raises(InvalidRequestError):
        check_fields({"image_data": value}, LIMITS)


@pytest.mark.parametrize(
    ("model", "body", "name", "problem"),
    [
        (CompletionBody, {"prompt": "a", "stop": [1]}, "", "stop[0] has the type number: send a string"),
        (CompletionBody, {"prompt": "a", "stop": ["a", None, 1]}, "", "stop[1] has the type null: send a string"),
        (CompletionBody, {"prompt": "a", "stop": 5}, "", "stop has the type number: send a string or an array"),
        (CompletionBody, {"prompt": "a", "stop": [1] * 12}, "", "stop[0] has the type number: send a string"),
        (CompletionBody, {"prompt": [1, "a"]}, "", "prompt[1] has the type string: send an integer or an array"),
        (CompletionBody, {"prompt": ["a", 1]}, "", "prompt[1] has the type number: send a string or an array"),
        (CompletionBody, {}, "", "prompt is missing: send it"),
        (ChatBody, {"messages": [1]}, "", "messages[0] has the type number: send an object"),
        (
            ChatBody,
            {"messages": [], "stream_options": {"include_usage": 1}},
            "",
            "stream_options.include_usage has the type number: send true or false",
        ),
        (GenerateBody, {"input_ids": [[1], ["a"]]}, "", "input_ids[1][0] has the type string: send an integer"),
        (NativeSampling, 5, "sampling_params", "sampling_params has the type number: send an object"),
        (
            NativeSampling,
            {"stop": [1]},
            "sampling_params",
            "sampling_params.stop[0] has the type number: send a string",
        ),
        (NativeSampling, {"n": 1.5}, "sampling_params[2]", "sampling_params[2].n has the type number: send an integer"),
        (
            NativeSampling,
            {"logit_bias": {"5": "x"}},
            "sampling_params",
            "sampling_params.logit_bias.5 has the type string: send a number",
        ),
        (AbortBody, [], "", "body has the type array: send an object"),
        (WeightsBody, {"model_pth": "x"}, "", "model_pth is not a field of this request: did you mean model_path?"),
        (CompletionBody, {"promt": "x"}, "", "promt is not a field of this request: did you mean prompt?"),
        (CompletionBody, {"text": "x", "p" * 1000: "x"}, "", "prompt is missing: send it"),
        (MemoryBody, {"tag": []}, "", "tag is not a field of this request: did you mean tags?"),
    ],
)
def test_a_value_of_a_wrong_type_is_rejected_by_its_path(
    model: type[RequestModel], body: object, name: str, problem: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(model, body, name)
    assert caught.value.message == problem
    assert caught.value.param == (None if problem.startswith("body") else problem.split(" ")[0])


@pytest.mark.parametrize("room", [-10, 1 << 63, "7", True, 1.5, {}, [3, -1], [[3]]])
def test_a_room_from_the_client_must_be_a_valid_one(room: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^bootstrap_room .*: must be an integer in \[0, 2\^63\)$") as caught:
        check_rooms(room)
    assert caught.value.param == "bootstrap_room"


@pytest.mark.parametrize("room", [None, 0, (1 << 63) - 1, [0, None], []])
def test_valid_rooms_from_the_client_are_accepted(room: object) -> None:
    check_rooms(room)


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [[1], [2]], [[]]])
def test_a_list_of_prompts_is_a_batch(prompt: object) -> None:
    assert is_batch(prompt)


@pytest.mark.parametrize("prompt", [None, "a", [], [1, 2], 5, {"a": 1}])
def test_a_text_a_list_of_ids_and_no_prompt_are_no_batch(prompt: object) -> None:
    assert not is_batch(prompt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["stop", "rid", "n"]), inner),
)


@given(st.dictionaries(st.sampled_from(["rid", "stop", "text", "n", "sampling_params", "messages", "regex"]), JSON))
def test_values_of_a_wrong_type_pass_for_the_validation_to_reject(body: dict[str, object]) -> None:
    n_is_large = any(isinstance(n, int) and n > LIMITS.max_n for n in _values_of_n(body))
    with pytest.raises(InvalidRequestError) if n_is_large else nullcontext():
        check_fields(body, LIMITS)


def _values_of_n(body: dict[str, object]) -> list[object]:
    sampling = body.get("sampling_params")
    parts = sampling if isinstance(sampling, list) else [sampling]
    return [part.get("n") for part in (body, *parts) if isinstance(part, dict)]


def test_unknown_fields_are_named_with_what_was_probably_meant() -> None:
    body = {"temprature": 1, "user": "me", "max_tokens": 3, "absent": None, "ä\r\n": 1}
    known = ["temperature", "max_new_tokens"]
    assert unknown_fields(body, known, "p.") == [
        "p.temprature (did you mean temperature?)",
        "p.max_tokens (did you mean max_new_tokens?)",
        "p.\\xe4\\r\\n",
    ]


@given(st.dictionaries(st.text(), st.integers()))
def test_a_warning_fits_into_a_header(body: dict[str, int]) -> None:
    text = ", ".join(unknown_fields(body, ["temperature"]))
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 8 * 400


@given(st.text(max_size=50), st.integers(10, 40))
def test_a_long_text_keeps_its_beginning_and_its_end(text: str, limit: int) -> None:
    short = shortened(text, limit)
    assert len(short) <= max(limit, 0)
    assert short == text or (len(text) > limit and text.startswith(short.split(" ... ")[0]))
