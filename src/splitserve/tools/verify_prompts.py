"""Prompts of `splitserve verify`: the user's from a JSONL file, or built-in ones at critical lengths.

A prompt is a part of a /generate body: {"text": ...} or {"input_ids": [...]}.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitserve.core.errors import ConfigError

# Token budget of a step in the workers that verify starts. It is small, so that built-in prompts cross chunk
# boundaries.
CHUNK_TOKENS = 256
# Lengths around the boundaries of pages (16 tokens) and chunks.
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 255, 256, 257, 513, 1200)
# Distance between the starts of two built-in prompts in the text, so that none is a prefix of another.
_STRIDE = 41

Prompt = dict[str, Any]


def read_prompts(path: Path) -> list[Prompt]:
    """Read lines of {"text": ...}, {"input_ids": [...]} or a JSON string.

    Raises ConfigError with the invalid line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read ({error}): name a JSONL file in UTF-8") from error
    prompts = [_parse(line, f"--prompts {path}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path}: no prompt in it: write one a line, e.g. " + '{"text": "Hello"}')
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error})") from error
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict) or ("text" in value) == ("input_ids" in value):
        raise ConfigError(f'{where}: write a string, {{"text": "..."}} or {{"input_ids": [...]}}')
    if "text" in value:
        if not isinstance(value["text"], str) or not value["text"]:
            raise ConfigError(f"{where}: text must be a string that is not empty")
        return {"text": value["text"]}
    ids = value["input_ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"{where}: input_ids must be a list of token ids (integers from 0), at least one")
    return {"input_ids": ids}


def built_in_prompts(passage_ids: Sequence[int], room: int) -> list[Prompt]:
    """Return pieces of the tokenized passage, of every length in LENGTHS up to `room`.

    The long ones repeat the passage.
    """
    prompts = []
    for i, length in enumerate(n for n in LENGTHS if n <= room):
        ids = [passage_ids[(i * _STRIDE + j) % len(passage_ids)] for j in range(length)]
        prompts.append({"input_ids": ids})
    return prompts
