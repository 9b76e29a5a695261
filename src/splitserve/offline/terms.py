"""Options of an Engine, and conversion of errors to its terms: flags and request fields become names of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import SplitserveError
from splitserve.core.options import options_of

# Configs with the options of an engine, and options in them that need several hosts or depend on the role.
_PARTS = ("model", "parallel", "dp_size", "cache", "scheduler", "speculative")
_NOT_HERE = ("load_timeout", "nnodes", "node_rank", "dist_init_addr", "shared_pool", "decode_prefix_cache")
ENGINE_OPTIONS = {
    option.name: option
    for option in options_of(WorkerConfig())
    if option.path.partition(".")[0] in _PARTS and option.name not in _NOT_HERE
}
# Text in errors of servers -> text for a program.
PHRASES = {
    "POST /resume_memory_occupation to it, or send the request to another worker": "call resume_memory_occupation()",
    "restart the worker": "close this engine and create another",
    "start all workers": "create the Engine",
    "start the worker": "create the Engine",
    "send the request again": "call again",
    "send it again": "call again",
}
_TERMS = {
    **{option.flag: option.name for option in ENGINE_OPTIONS.values()},
    "--transfer-backend": "transfer_backend",
    "--disaggregation-transfer-backend": "transfer_backend",
    "--hand-over": "hand_over",
    "--load-timeout": "load_timeout",
    "input_ids": "prompt",
    "top_logprobs_num": "logprobs",
    "return_hidden_states": "hidden_states",
    **PHRASES,
}
_ANY_TERM = re.compile("|".join(rf"(?<![\w-]){re.escape(term)}(?![\w-])" for term in sorted(_TERMS, reverse=True)))
# A limit that no argument sets.
_FLAG_IN_BRACKETS = re.compile(r" \(--[a-z-]+\)")
# Words of JSON -> words of Python, in errors about the type of a value.
_WORDS = {
    "an array": "a list",
    "an object": "a dict",
    "array": "list",
    "object": "dict",
    "null": "None",
    "true": "True",
    "false": "False",
}
_ANY_WORD = re.compile(rf"\b({'|'.join(sorted(_WORDS, reverse=True))})\b")


@contextmanager
def engine_terms(given: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Convert errors raised inside the block to the terms of an Engine. `given`: option -> the caller's name of it."""
    try:
        yield
    except SplitserveError as error:
        in_engine_terms(error)
        error.message = re.sub(r"\w+", lambda word: given.get(word[0], word[0]), error.message)
        error.args = (error.message,)
        raise


def python_words(text: str) -> str:
    """Return an error about the type of a value with Python's names of types."""
    return _ANY_WORD.sub(lambda word: _WORDS[word[0]], text)


def in_engine_terms(error: SplitserveError) -> None:
    """Name arguments of an Engine and of its calls in the text of an error."""
    error.message = _in_terms(error.message)
    error.args = (error.message,)
    error.param = error.param and _in_terms(error.param)


def _in_terms(text: str) -> str:
    text = _ANY_TERM.sub(lambda term: _TERMS[term[0]], text)
    text = python_words(text) if " has the type " in text else text
    return _FLAG_IN_BRACKETS.sub("", text.replace(": send ", ": give "))
