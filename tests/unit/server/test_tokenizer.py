from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from splitserve.api.tokenizer import ChatTemplate, Tokenizer
from splitserve.core.errors import InvalidRequestError, ModelLoadError

from .server_fakes import CHAT_TEMPLATE, stripping_tokenizer, write_tokenizer_folder

CHAT = [{"role": "user", "content": "Hi <b>🙂</b>"}, {"role": "assistant", "content": "Hello"}]


def test_text_goes_to_ids_and_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("héllo 🙂")
    assert len(ids) == len("héllo 🙂".encode())
    assert tokenizer.decode(ids) == "héllo 🙂"


def test_other_threads_go_on_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    text = "héllo 🙂 " * 40_000
    expected = tokenizer.backend.encode(text).ids
    limit = time.monotonic() + 60
    # On a busy machine this thread may get few turns within one call.
    while num_turns_during(lambda: tokenizer.encode(text), expected) <= 20:
        assert time.monotonic() < limit


def num_turns_during(encode: Callable[[], list[int]], expected: list[int]) -> int:
    """Call `encode` in another thread. Return how often this one had a turn meanwhile."""
    done, ids = threading.Event(), list[int]()

    def run() -> None:
        ids.extend(encode())
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    num_turns = 0
    while not done.wait(0.001):
        num_turns += 1
    thread.join()
    assert ids == expected
    return num_turns


@pytest.mark.parametrize("options", [{"add_generation_prompt": True}, {"continue_final_message": True}, {}])
def test_a_chat_is_rendered_as_transformers_does(tokenizer_folder: Path, options: dict[str, bool]) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    options = {"add_generation_prompt": False} | options
    expected = theirs.apply_chat_template(CHAT, return_dict=False, **options)
    assert Tokenizer.load(tokenizer_folder).encode_chat(CHAT, **options) == expected


def test_a_model_without_a_chat_template_refuses_chats(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer_folder(tmp_path, chat_template=False))
    with pytest.raises(InvalidRequestError, match="no chat template: use /v1/completions"):
        tokenizer.encode_chat(CHAT)


def test_the_chat_template_may_be_in_the_file_of_a_processor(tmp_path: Path) -> None:
    """As in checkpoints of LLaVA and Mistral Small 3.1."""
    tokenizer = Tokenizer.load(write_tokenizer_folder(tmp_path))
    folder = tmp_path / "other"
    folder.mkdir()
    write_tokenizer_folder(folder, chat_template=False)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert Tokenizer.load(folder).encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize("options", [{}, {"continue_final_message": True}])
def test_a_template_for_lists_of_parts_gets_the_text_as_a_part(options: dict[str, bool]) -> None:
    """LLaVA's template drops contents that are strings."""
    source = (
        "{% for message in messages %}<{{ message.role }}>"
        "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
        "{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.render(CHAT, **options) == "<user>Hi <b>🙂</b><assistant>Hello"


def test_a_template_for_parts_of_users_alone_gets_other_contents_as_strings() -> None:
    """System messages got a 400, and the text of an assistant was Python's form of the list."""
    source = (
        "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '|' %}{% endif %}"
        "{% for message in messages if message.role != 'system' %}<{{ message.role }}>"
        "{% if message.role == 'assistant' %}{{ message.content }}{% else %}{{ first }}"
        "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    template = ChatTemplate(source, {})
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert template.render(chat) == "<user>Be brief.|Hi <b>🙂</b><assistant>Hello"
    assert template.render(chat, continue_final_message=True) == "<user>Be brief.|Hi <b>🙂</b><assistant>Hello"


def test_the_chat_template_may_stand_in_the_tokenizer_config(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, chat_template=False)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": ""}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = Tokenizer.load(folder).decode(Tokenizer.load(folder).encode_chat(CHAT), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nHi <b>")


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="holds no tokenizer"):
        Tokenizer.load(tmp_path)


def test_bytes_of_a_token_are_known_where_they_are_no_whole_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")
    assert b"".join(tokenizer.token_bytes(t) for t in ids) == "🙂".encode()
    assert tokenizer.token_bytes(257) == b"<|im_end|>"


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.ByteLevel(), b"\xf0"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), b"\xf0"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "ð".encode()),
        (None, "ð".encode()),
    ],
)
def test_characters_are_bytes_for_a_decoder_of_bytes(decoder: decoders.Decoder | None, expected: bytes) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"ð": 0}, unk_token="ð"))
    if decoder is not None:
        backend.decoder = decoder
    assert Tokenizer(backend, chat_template=None).token_bytes(0) == expected


def test_a_token_has_its_space_also_if_the_decoder_strips_the_first_one_of_a_text() -> None:
    tokenizer = Tokenizer(stripping_tokenizer(), chat_template=None)
    ids = tokenizer.encode("a b€")
    assert [tokenizer.token_text(t) for t in ids] == ["<s>", " a", " b", "\ufffd", "\ufffd", "\ufffd"]
    assert b"".join(tokenizer.token_bytes(t) for t in ids[1:]) == " a b€".encode()


def test_a_template_that_fails_by_any_error_is_loaded_and_fails_its_requests():
    template = ChatTemplate("{{ 1 // (messages|length - 1) }}{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "1a"


def test_a_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render(CHAT)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidRequestError, match="unsafe"):
        template.render(CHAT)


def test_templates_have_the_tools_of_transformers() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ bos_token }}{{ extra }}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT, template_variables={"extra": "!"})
    assert rendered == '{"role": "user", "content": "Hi <b>🙂</b>"}<s>!'
