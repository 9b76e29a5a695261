"""Metadata of a request that decode needs in addition to its KV: one fixed-size row, written by prefill into decode.

1. Decode allocates a row and announces its index with the pages.
2. Prefill fills a row of its own (`set_buf`). After all pages, the transport copies it into decode's row.
3. Decode reads it (`get_buf`) and checks, by key and checksum, that it is this room's row and complete.

The rows are a memory region, independent of transports.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from splitserve.core.batch import DraftState, HiddenState, TokenLogprob
from splitserve.core.errors import CapacityError, KVTransferError
from splitserve.core.layout import Region
from splitserve.core.machine import Arena
from splitserve.core.request import RoomKey

# Every field starts at a multiple of this many bytes: no RDMA write or cache line is shared between two fields.
FIELD_ALIGNMENT = 64


class RowWidths(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of the optional fields of a row, in numbers. 0: rows have no such field.

    The handshake requires the same widths on both workers.
    """

    # Likeliest tokens beside the first token.
    top_logprobs: int = 128
    hidden_state: int = 0
    draft_state: int = 0

    def difference(self, other: RowWidths) -> str | None:
        """Return the first field that differs, with the option that sets it and both widths. None: all are equal."""
        for name, option in _WIDTH_OPTIONS.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                widths = f"width of {name} in the metadata row {ours} against {theirs}"
                return f"{widths}: give both workers the same {option}"
        return None


_WIDTH_OPTIONS = {
    "top_logprobs": "--max-top-logprobs",
    "hidden_state": "--enable-return-hidden-states",
    "draft_state": "--speculative-algorithm",
}

# Fields that are vectors of float32. `RowWidths` has their widths under the same names.
_STATES = ("hidden_state", "draft_state")


@dataclass(frozen=True, slots=True)
class MetadataRow:
    """Values sent with one room's KV cache."""

    key: RoomKey
    # The first token, sampled by prefill.
    output_id: int
    # Number of prompt tokens that prefill found in its prefix cache.
    num_cached_tokens: int = 0
    # Logprob of the first token, if requested, with up to `RowWidths.top_logprobs` entries in `top`.
    logprob: TokenLogprob | None = None
    # Hidden state that the first token was sampled from, that of the last prompt token. None: not requested.
    hidden_state: HiddenState | None = None
    # State of the draft head behind the first token. None: there is no draft head.
    draft_state: DraftState | None = None


class MetadataBuffers:
    """`size` rows in one contiguous region: the transport's last region, after those of the layout.

    `shareable`: the transport needs memory that other processes can map.
    """

    def __init__(self, size: int, widths: RowWidths | None = None, *, shareable: bool = False) -> None:
        self.size = size
        self.widths = widths or RowWidths()
        self._dtype = _row_dtype(self.widths)
        self._arena = Arena(size * self.row_bytes, shareable=shareable)
        self._rows = np.frombuffer(self._arena.buffer, dtype=self._dtype)
        self._bytes = self._rows.view(np.uint8).reshape(size, self.row_bytes)

    @property
    def row_bytes(self) -> int:
        """Stride of a row in bytes. It follows from the widths."""
        return self._dtype.itemsize

    def region(self) -> Region:
        return self._arena.region()

    def set_buf(self, index: int, row: MetadataRow) -> None:
        """Fill a row and add its checksum. Raises ValueError if `row` does not fit."""
        top = row.logprob.top if row.logprob else ()
        if len(top) > self.widths.top_logprobs:
            raise ValueError(f"room {row.key}: {len(top)} top logprobs, the row holds {self.widths.top_logprobs}")
        states = {name: np.frombuffer(state, np.float32) for name in _STATES if (state := getattr(row, name))}
        for name, numbers in states.items():
            if len(numbers) != (width := getattr(self.widths, name)):
                raise ValueError(f"room {row.key}: {name} of {len(numbers)} numbers, the row holds {width}")
        self._bytes[index] = 0
        record = self._rows[index]
        record["key"] = (row.key.room, row.key.sample)
        record["output_id"] = row.output_id
        record["num_cached_tokens"] = row.num_cached_tokens
        if row.logprob is not None:
            # Number of top logprobs plus one. 0: no logprob at all.
            record["num_logprobs"] = len(top) + 1
            record["logprob_ids"][: len(top) + 1] = [row.logprob.token_id, *(t for t, _ in top)]
            record["logprob_values"][: len(top) + 1] = [row.logprob.logprob, *(v for _, v in top)]
        for name, numbers in states.items():
            record[f"has_{name}"] = 1
            record[name] = numbers
        record["checksum"] = self._checksum(index)

    def get_buf(self, index: int, key: RoomKey) -> MetadataRow:
        """Read a row. Raises KVTransferError if it is another room's (foreign) or incomplete (torn)."""
        record = self._rows[index]
        if int(record["checksum"]) != self._checksum(index):
            raise KVTransferError(key.room, f"metadata row {index} of room {key} is torn: its checksum does not match")
        found = RoomKey(int(record["key"][0]), int(record["key"][1]))
        if found != key:
            raise KVTransferError(key.room, f"metadata row {index} is foreign: it holds room {found}, not {key}")
        return MetadataRow(
            key=key,
            output_id=int(record["output_id"]),
            num_cached_tokens=int(record["num_cached_tokens"]),
            logprob=_logprob(record),
            **{name: record[name].tobytes() for name in _STATES if record[f"has_{name}"]},
        )

    def _checksum(self, index: int) -> int:
        end = self._dtype.fields["checksum"][1] if self._dtype.fields else 0
        return xxhash.xxh64_intdigest(self._bytes[index, :end].data)


class ReqToMetadataIdxAllocator:
    """Allocator of metadata rows."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(reversed(range(size)))
        self._taken: set[int] = set()

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        """Allocate a row. Raises CapacityError if none is free."""
        if not self._free:
            raise CapacityError(f"all {self.size} metadata rows are in use: retry later or raise --num-metadata-slots")
        index = self._free.pop()
        self._taken.add(index)
        return index

    def free(self, index: int) -> None:
        """Free a row. Raises ValueError if it is not taken: freed twice, or never allocated."""
        if index not in self._taken:
            raise ValueError(f"metadata row {index} is freed, but not allocated")
        self._taken.remove(index)
        self._free.append(index)


def _row_dtype(widths: RowWidths) -> np.dtype[np.void]:
    fields: list[tuple[str, np.dtype[np.generic] | str]] = [
        ("key", "(2,)u8"),
        ("output_id", "i8"),
        ("num_cached_tokens", "i8"),
        ("num_logprobs", "i8"),
        ("logprob_ids", f"({widths.top_logprobs + 1},)i8"),
        ("logprob_values", f"({widths.top_logprobs + 1},)f8"),
        ("has_hidden_state", "i8"),
        ("hidden_state", f"({widths.hidden_state},)f4"),
        ("has_draft_state", "i8"),
        ("draft_state", f"({widths.draft_state},)f4"),
        ("checksum", "u8"),
    ]
    offsets, end = [], 0
    for _, kind in fields:
        offsets.append(end)
        size = max(np.dtype(kind).itemsize, 1)
        end += -(-size // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
    return np.dtype(
        {"names": [n for n, _ in fields], "formats": [k for _, k in fields], "offsets": offsets, "itemsize": end}
    )


def _logprob(record: np.void) -> TokenLogprob | None:
    n = int(record["num_logprobs"])
    if n == 0:
        return None
    ids: list[int] = record["logprob_ids"][:n].tolist()
    values: list[float] = record["logprob_values"][:n].tolist()
    return TokenLogprob(ids[0], values[0], tuple(zip(ids[1:], values[1:], strict=True)))
