"""Request traces in Mooncake's published form: JSON Lines, one request each (Qin et al., FAST '25).

`{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}`: milliseconds, tokens, and a key
for each 512 tokens of the prompt. Equal keys mean equal tokens, so that prompts share prefixes as the real ones did.
The file does not have the prompts' words. They are replaced with random ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from splitserve.core.errors import ConfigError, clause
from splitserve.tools.bench.prompts import PromptMaker
from splitserve.tools.bench.workload import LoadRequest

# Prompt tokens per entry of `hash_ids`.
BLOCK_TOKENS = 512


class TraceRow(msgspec.Struct, frozen=True):
    # Milliseconds since the trace began.
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []

    def __post_init__(self) -> None:
        if self.timestamp < 0 or self.input_length < 1 or self.output_length < 1:
            raise ValueError("timestamp must be at least 0, input_length and output_length at least 1")


def read_trace(path: Path, count: int | None = None) -> list[TraceRow]:
    """Read the first `count` requests, or all, ordered by time. Raises ConfigError with the file and line."""
    decoder = msgspec.json.Decoder(TraceRow)
    rows: list[TraceRow] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if count is not None and len(rows) == count:
                    break
                if line.strip():
                    rows.append(_row(decoder, line, f"--trace {path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be read ({error.strerror}): name another file") from error
    if not rows:
        raise ConfigError(f"--trace {path}: it holds no request")
    return sorted(rows, key=lambda row: row.timestamp)


@dataclass(frozen=True, slots=True)
class Trace:
    rows: Sequence[TraceRow]
    # Factor on the tokens of the trace. A length is at least one token.
    length_scale: float
    # Factor on the requests per second.
    speed: float

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


def _row(decoder: msgspec.json.Decoder[TraceRow], line: bytes, where: str) -> TraceRow:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{where}: {clause(error)}. Give JSON Lines of timestamp, input_length, output_length"
        ) from error
