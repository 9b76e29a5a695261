"""Prompts, requests and their times: what benchmarks send. Pure: equal seeds give every system the same requests.

Prompts   Random English words of exact lengths. Each word of the stock is one token, so that a prompt has the same
          length as text and as token ids. If a tokenizer has too few such words, prompts are token ids only. No two
          prompts share a prefix, so that no prefix cache helps, except prompts of the same blocks.
Loads     Requests of a load generator. Lengths come from options or from a trace. In an open loop each request has a
          time: from a trace, or a random one. A closed loop ignores times.
Traces    Mooncake's published form (Qin et al., FAST '25), JSON Lines of one request each:
          `{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}`: milliseconds, tokens,
          and a key for each 512 tokens of the prompt. Equal keys mean equal tokens, so that prompts share prefixes as
          the real ones did. The file does not have the prompts' words. They are replaced with random ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import msgspec

from splitserve.tools.bench.options import ServeBenchOptions
from splitserve.tools.passage import PASSAGE, read_json_lines

Encode = Callable[[str], Sequence[int]]
WARM_UP_OUTPUT_TOKENS = 8
# Prompt tokens per entry of `hash_ids` in a trace.
BLOCK_TOKENS = 512
# Minimum number of words, so that prompts differ early.
_MIN_WORDS = 50


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    ids: list[int]
    # Text that encodes to `ids`. Empty: the tokenizer has too few words of one token.
    text: str


class PromptMaker:
    """Maker of prompts. Equal seeds give equal prompts."""

    def __init__(self, encode: Encode, seed: int = 0) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        # (token id, its text)
        self._stock = _single_tokens(encode) or [(token, "") for token in sorted(set(encode(PASSAGE)))]

    def make(self, num_tokens: int) -> Prompt:
        return self._prompt(self._random.choices(self._stock, k=num_tokens))

    def make_of_blocks(self, keys: Sequence[Hashable], block_tokens: int, num_tokens: int) -> Prompt:
        """Return a prompt of blocks.

        Equal keys give equal blocks in all prompts. Tokens beyond the last block are new.
        """
        words: list[tuple[int, str]] = []
        for key in keys[: -(-num_tokens // block_tokens)]:
            # A string gives the same random numbers in every process.
            words += random.Random(f"{self._seed}:{key}").choices(self._stock, k=block_tokens)
        words += self._random.choices(self._stock, k=max(0, num_tokens - len(words)))
        return self._prompt(words[:num_tokens])

    def _prompt(self, words: Sequence[tuple[int, str]]) -> Prompt:
        return Prompt(ids=[token for token, _ in words], text="".join(text for _, text in words))


def _single_tokens(encode: Encode) -> list[tuple[int, str]]:
    """Return the words that are one token each at any position. Empty: there are too few."""
    stock = []
    for word in sorted(set(re.findall(r"[a-z]+", PASSAGE.lower()))):
        ids = list(encode(f" {word}"))
        if len(ids) == 1:
            stock.append((ids[0], f" {word}"))
    together = list(encode("".join(text for _, text in stock)))
    return stock if len(stock) >= _MIN_WORDS and together == [token for token, _ in stock] else []


@dataclass(frozen=True, slots=True)
class LoadRequest:
    prompt: Prompt
    # The answer has exactly this many tokens.
    max_tokens: int
    # Seconds after the start of the run.
    send_at: float = 0.0


class TraceRow(msgspec.Struct, frozen=True):
    # Milliseconds since the trace began.
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []

    def __post_init__(self) -> None:
        if self.timestamp < 0 or self.input_length < 1 or self.output_length < 1:
            raise ValueError("timestamp must be at least 0, input_length and output_length at least 1")


@dataclass(frozen=True, slots=True)
class Trace:
    rows: Sequence[TraceRow]
    # Factor on the tokens of the trace. A length is at least one token.
    length_scale: float
    # Factor on the requests per second.
    speed: float

    @classmethod
    def read(cls, path: Path, num_rows: int | None = None, length_scale: float = 1.0, speed: float = 1.0) -> Trace:
        """Read the first `num_rows` requests, or all, ordered by time. Raises ConfigError with the file and line."""
        form = "JSON Lines of timestamp, input_length, output_length"
        rows: list[TraceRow] = read_json_lines(path, TraceRow, "--trace", form, num_rows)
        return cls(sorted(rows, key=lambda row: row.timestamp), length_scale, speed)

    @property
    def longest(self) -> int:
        return max(self._scaled(row.input_length) + self._scaled(row.output_length) for row in self.rows)

    def requests(self, maker: PromptMaker) -> Iterator[LoadRequest]:
        block_tokens = self._scaled(BLOCK_TOKENS)
        for row in self.rows:
            prompt = maker.make_of_blocks(row.hash_ids, block_tokens, self._scaled(row.input_length))
            send_at = (row.timestamp - self.rows[0].timestamp) / 1e3 / self.speed
            yield LoadRequest(prompt, self._scaled(row.output_length), send_at)

    def _scaled(self, length: int) -> int:
        return max(1, round(length * self.length_scale))


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield seconds from the start without end, with a mean of `rate` per second.

    Gaps are sampled from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less gives bursts, and
    more is more regular.
    """
    generator, now = random.Random(seed), 0.0
    while True:
        now += generator.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield now


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load of one run, the same for every system.

    `options`: with `concurrency`, or None for an open loop. Without a `request_rate`, that has the trace's own times.
    """

    options: ServeBenchOptions
    trace: Trace | None = None

    def requests(self, encode: Encode) -> Iterator[LoadRequest]:
        """Yield new prompts of the same seed each time. Endless if neither `num_prompts` nor a trace limits it."""
        options, maker = self.options, PromptMaker(encode, self.seed)
        requests: Iterator[LoadRequest]
        if self.trace is not None:
            requests = self.trace.requests(maker)
        else:
            requests = (LoadRequest(maker.make(options.input_tokens), options.output_tokens) for _ in count())
        if options.request_rate is not None:
            times = arrival_times(options.request_rate, options.burstiness, self.seed)
            requests = (replace(request, send_at=at) for request, at in zip(requests, times, strict=False))
        return islice(requests, options.num_prompts)

    def warm_up(self, encode: Encode) -> list[LoadRequest]:
        """Return the first requests with other prompts and short answers."""
        others = LoadPlan(msgspec.structs.replace(self.options, seed=self.seed + 1), self.trace)
        first = islice(others.requests(encode), self.options.warmup_requests)
        return [replace(r, max_tokens=min(r.max_tokens, WARM_UP_OUTPUT_TOKENS)) for r in first]

    @property
    def seed(self) -> int:
        return self.options.seed or 0

    @property
    def longest(self) -> int:
        """Return the maximum tokens of a prompt and its answer together."""
        return self.trace.longest if self.trace else self.options.input_tokens + self.options.output_tokens

    def describe(self) -> str:
        """Return the load in words for a report."""
        options = self.options
        if options.concurrency is not None:
            pace = f"closed loop, {options.concurrency} at once"
        elif options.request_rate is not None:
            pace = f"open loop, {options.request_rate:g} requests/s, burstiness {options.burstiness:g}"
        else:
            pace = "open loop, at the trace's times"
        tokens = f"{options.input_tokens:,} prompt and {options.output_tokens:,} output tokens"
        return f"{pace}; {'a trace' if self.trace else tokens}"
