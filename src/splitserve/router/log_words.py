"""Client values and shapes of requests in log lines: one word for each value, and no text of the client."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from splitserve.api.schemas import NativeSampling, SamplingFields
from splitserve.api.validation import is_batch
from splitserve.core.grammar import GrammarKind
from splitserve.router.pairing import Body

_WORD = re.compile(r"[\w.:/@+-]{1,128}", re.ASCII)
_MAX_TOKENS = ("max_new_tokens", "max_completion_tokens", "max_tokens")
_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def one_word(value: object) -> str:
    """Return a client's value as one word that cannot begin a line or a field of the log. None: `-`."""
    if value is None:
        return "-"
    text = str(value)
    return text if _WORD.fullmatch(text) else msgspec.json.encode(text[:128]).decode().replace(" ", "\\u0020")


def shape_of(path: str, body: Body) -> str:
    """Return `name=value` words. Prompts count in tokens if they are token ids, else in bytes."""
    sampling = _sampling(path, body)
    max_tokens = next((n for name in _MAX_TOKENS if type(n := sampling.get(name, body.get(name))) is int), "-")
    known = NativeSampling.model_fields if path == "/generate" else SamplingFields.model_fields
    names = ",".join(sorted(name for name in known if sampling.get(name) is not None))
    words = [
        f"route={path}",
        *_prompt(body),
        f"max_tokens={max_tokens}",
        f"stream={str(body.get('stream') is True).lower()}",
        f"sampling={names or '-'}",
        f"grammar={_grammar(body, sampling)}",
    ]
    return " ".join(words)


def _sampling(path: str, body: Body) -> dict[str, Any]:
    params = body.get("sampling_params") if path == "/generate" else body
    if isinstance(params, list) and params:
        params = params[0]
    return params if isinstance(params, dict) else {}


def _prompt(body: Body) -> list[str]:
    value = next((found for name in ("text", "prompt", "input_ids") if (found := body.get(name)) is not None), None)
    if value is None:
        messages = body.get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        return [f"messages={count}", f"prompt_bytes={len(msgspec.json.encode(messages))}"]
    prompts = value if is_batch(value) else [value]
    num_tokens = sum(len(prompt) for prompt in prompts if isinstance(prompt, list))
    num_bytes = sum(len(prompt.encode()) for prompt in prompts if isinstance(prompt, str))
    return [f"prompts={len(prompts)}", f"prompt_tokens={num_tokens}", f"prompt_bytes={num_bytes}"]


def _grammar(body: Body, sampling: dict[str, Any]) -> str:
    for kind in GrammarKind:
        if sampling.get(kind) is not None:
            return str(kind)
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") in _RESPONSE_FORMATS:
        return str(form["type"])
    return "tools" if body.get("tools") else "-"
