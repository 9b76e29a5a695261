"""Tokenizer and chat template of a model, from a local folder.

Reads tokenizer.json with the `tokenizers` library, which loads in a tenth of a second. transformers takes seconds to
import. It is imported only for folders without tokenizer.json, or with a tokenizer class that changes its meaning.

The chat template is the model's own Jinja template, in the language of transformers: sandboxed, blocks trimmed, with
`raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, loop controls and `{% generation %}`. Templates
come with models and are not trusted.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitserve.core.errors import InvalidRequestError, PromptTooLongError, UnsupportedModelError, clause

Messages = Sequence[Mapping[str, Any]]

# Marks the end of the final message's text, so that the prompt can be cut there. No model generates it.
_END_OF_FINAL_MESSAGE = "\ue000end-of-final-message\ue000"
# Tokenizer classes that use tokenizer.json unchanged.
_PLAIN_CLASSES = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast", "TokenizersBackendFast"})
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Maximum characters per token of usual text. A text that is short by this measure is tokenized without a check.
_USUAL_CHARS_PER_TOKEN = 8
# Characters that the check tokenizes at once, and the most tokens that a cut between two pieces adds.
_PIECE_CHARS = 32_768
_TOKENS_PER_CUT = 64
# Content of a message. No template contains it.
_TEMPLATE_PROBE = "3141592653589793"
# Chats with a message of each role that has this content.
_PROBE_CHATS = {
    role: [{"role": each, "content": _TEMPLATE_PROBE if each == role else "Hi"} for each in roles]
    for role, roles in {"user": ["user"], "system": ["system", "user"], "assistant": ["user", "assistant"]}.items()
}


class ChatTemplate:
    """Chat template of a model. `variables`: special tokens by name. `knows_tools`: it supports tools."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = _environment()
        self.source = source
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        self._template = environment.from_string(source)
        self._variables = dict(variables)
        # Whether contents are passed as lists of parts. Templates of some multimodal models drop strings.
        self._takes_parts = False
        # Roles of which contents are passed as strings nevertheless.
        self._string_roles: set[str] = set()
        if not self._keeps_text("user"):
            self._takes_parts = True
            self._takes_parts = self._keeps_text("user")
            for role in ("system", "assistant"):
                self._string_roles.add(role)
                if not self._keeps_text(role):
                    self._string_roles.remove(role)

    def _keeps_text(self, role: str) -> bool:
        """Return whether the prompt has the text of a role's message. False if the template fails, by any error."""
        try:
            return _TEMPLATE_PROBE in self.render(_PROBE_CHATS[role])
        except Exception:
            return False

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Raises InvalidRequestError if the template rejects the messages.

        `template_variables`: further variables of this model's template.
        """
        chat = [dict(m) for m in messages]
        if continue_final_message:
            chat[-1]["content"] = f"{chat[-1]['content']}{_END_OF_FINAL_MESSAGE}"
            add_generation_prompt = False
        if self._takes_parts:
            for message in chat:
                if message["role"] not in self._string_roles:
                    message["content"] = [{"type": "text", "text": message.get("content") or ""}]
        variables = self._variables | {"tools": None, "documents": None} | dict(template_variables or {})
        try:
            prompt = self._template.render(
                variables | {"messages": chat, "add_generation_prompt": add_generation_prompt}
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {clause(error)}; check roles, their order and the "
                "contents",
                param="messages",
            ) from error
        if not continue_final_message:
            return prompt
        prompt, mark, _ = prompt.rpartition(_END_OF_FINAL_MESSAGE)
        if not mark:
            raise InvalidRequestError(
                "the model's chat template drops the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return prompt


class _GenerationTag(jinja2.ext.Extension):
    """Tag `{% generation %}...{% endgeneration %}`: marks text for training. Here it yields its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Tokenizer:
    """Tokenizer of one model. `backend`: tokenizers.Tokenizer, for the detokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer, *, chat_template: ChatTemplate | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.chat_template = chat_template
        # Its pickled state is its part of tokenizer.json. The whole text would take 60 ms, as it has the vocabulary.
        decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._is_byte_level = any(d.get("type") == "ByteLevel" for d in (decoder, *decoder.get("decoders", ())))
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in self._added.items() if token.special)
        # Texts of single tokens. Bounded by the vocabulary.
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, folder: str | Path, backend: tokenizers.Tokenizer | None = None) -> Tokenizer:
        """Load the tokenizer of a model folder. `backend`: result of `load_backend`. None: load it.

        Raises ModelLoadError.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        backend = _load_backend(folder, config) if backend is None else backend
        special = {name: _content(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        source = _chat_template_source(folder, config)
        template = None if source is None else ChatTemplate(source, special)
        return cls(backend, chat_template=template)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids with a text. The model's own vocabulary may be padded beyond that."""
        return self.backend.get_vocab_size()

    def encode(
        self,
        text: str | list[int],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        name: str | None = None,
    ) -> list[int]:
        """Return the tokens of a prompt. Raises PromptTooLongError before it tokenizes a text far above `max_tokens`.

        A prompt of tokens stays as it is. `name`: field of the request that has the prompt, for the error.
        """
        if isinstance(text, list):
            return text
        if max_tokens is not None:
            self._check_length(text, max_tokens, name)
        return self._encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # `backend.encode` holds the interpreter's lock until it ends, which blocks every other thread. `encode_batch`
        # does not.
        [encoding] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _check_length(self, text: str, max_tokens: int, name: str | None) -> None:
        """Count the tokens piece by piece and raise PromptTooLongError as soon as they are too many.

        A cut between two pieces may split a token or a word differently. The count allows for these few tokens.
        """
        if len(text) <= _USUAL_CHARS_PER_TOKEN * max_tokens:
            return
        num_tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            num_tokens += max(0, len(self._encode(piece, add_special_tokens=False)) - _TOKENS_PER_CUT)
            if num_tokens > max_tokens:
                raise PromptTooLongError(
                    f"the prompt has {len(text)} characters, its first {start + len(piece)} more than {max_tokens} "
                    "tokens, which is the limit of a request: shorten it",
                    param=name,
                )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(self, messages: Messages, *, max_tokens: int | None = None, **options: Any) -> list[int]:
        """Return the tokens of a conversation. `options` as for ChatTemplate.render, `max_tokens` as for `encode`."""
        if self.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions or /generate with a plain prompt",
                param="messages",
            )
        prompt = self.chat_template.render(messages, **options)
        return self.encode(prompt, add_special_tokens=False, max_tokens=max_tokens, name="messages")

    @functools.cached_property
    def _anchor(self) -> list[int]:
        """Tokens to decode before a single token. Empty: the decoder does not strip the first space of a text.

        If it does, " a" twice has more text than the text of " a", twice.
        """
        if self.backend.decoder is None:
            return []
        letter: list[int] = self.backend.encode(" a", add_special_tokens=False).ids
        return letter if self.decode(letter * 2) != self.decode(letter) * 2 else []

    def token_text(self, token_id: int) -> str:
        """Return the text of one token inside a text; special tokens by their names."""
        text = self._texts.get(token_id)
        if text is None:
            start = len(self.decode(self._anchor, skip_special_tokens=False))
            text = self.decode([*self._anchor, token_id], skip_special_tokens=False)[start:]
            self._texts[token_id] = text
        return text

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether `decode` does not skip the token: it is in the vocabulary, and not a skipped special token."""
        is_skipped = skip_special_tokens and token_id in self._special
        return not is_skipped and self.backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, even if they are no whole character."""
        token = self.backend.id_to_token(token_id)
        if token is None or token_id in self._added:
            return self.token_text(token_id).encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF_CHARACTER.get(c, ord("?")) for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return self.token_text(token_id).encode()


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """Load the vocabulary and the rules of a model folder: most of a tokenizer's memory. Raises ModelLoadError."""
    return _load_backend(folder, _read_json(folder / "tokenizer_config.json"))


def _load_backend(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    is_plain = config.get("tokenizer_class", "PreTrainedTokenizerFast") in _PLAIN_CLASSES
    if file.is_file() and is_plain and not {"add_bos_token", "add_eos_token"} & config.keys():
        return tokenizers.Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    except (OSError, ValueError, AttributeError) as error:
        raise UnsupportedModelError(f"{folder} holds no tokenizer that can be loaded: {error}") from error
    return backend


def _chat_template_source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _content(token: Any) -> str:
    """Return a special token of the config: a string, or an object that contains the string."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _byte_of_character() -> dict[str, int]:
    """Return the byte of each printable character that byte-level BPE writes for it (Radford et al., GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
