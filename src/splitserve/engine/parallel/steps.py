"""One step over several ranks: the driver's orders to the other ranks, and the followers that run them.

An order has all data that the other ranks need to compute their share of a step. It is one message per step, the same
for all ranks. Its size is that of its tokens and page numbers. Orders about copies in host memory (`copies.py`) use
the same pipe.

A follower is a rank without a scheduler. It samples no tokens and has no requests. If it cannot execute an order, the
other ranks wait for it, so its process must end.

If the ranks also share a draft model, its steps have orders of their own between those of the served model. They begin
with a mark, and are numbered separately.

With data parallel attention the ranks of all drivers compute a step together. The driver then sends its order when all
drivers have joined the step, behind a `JointOrder` with the number of tokens of each (`JointOrders`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from splitserve.core.batch import LAST_SAMPLED, StepPlan
from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import AttentionBackend, IntArray, PagedBatch
from splitserve.engine.inputs import to_device, wait_for
from splitserve.engine.kernels.decoder import PlainDecoder
from splitserve.engine.loader import LoadedModel
from splitserve.engine.parallel.copies import CopyOrder, FollowerCopies
from splitserve.engine.parallel.dp_attention import take_part
from splitserve.engine.probe import LanguageHead

# First byte of an order of the draft model. No msgpack message begins with it.
_DRAFT_MARK = b"\xc1"


class StepOrder(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """One forward pass. Arrays are the bytes of int64 numbers, `pages` of int32, in this host's byte order."""

    # Counts from 0, to detect lost or repeated orders.
    number: int
    # Tokens of all requests, one after the other; none is LAST_SAMPLED.
    token_ids: bytes
    # Per request: tokens computed before, tokens to compute.
    starts: bytes
    lengths: bytes
    # Page numbers of the first request, then of the second, and so on: as many for each as its tokens need.
    pages: bytes
    # Rows of the step with logits that are computed, call after call.
    head_rows: tuple[bytes, ...]
    # Page numbers in the windowed layers' own pool, arranged as `pages`. None: there is no such pool.
    window_pages: bytes | None = None

    def batch(self, page_size: int) -> PagedBatch:
        """Return the batch of the order. Raises EngineError if the order contradicts itself."""
        starts, lengths = array(self.starts), array(self.lengths)
        if len(starts) != len(lengths) or len(array(self.token_ids)) != lengths.sum():
            raise EngineError(f"order {self.number} of the driver contradicts itself")
        ends = np.cumsum(-(-(starts + lengths) // page_size))
        window_pages = None if self.window_pages is None else self._split(self.window_pages, ends)
        return PagedBatch(starts, lengths, self._split(self.pages, ends), page_size, window_pages)

    def _split(self, data: bytes, ends: IntArray) -> tuple[IntArray, ...]:
        """Split a list of pages by request; `ends`: end of each request's pages."""
        pages = np.frombuffer(data, dtype=np.int32).astype(np.int64)
        if len(pages) != ends[-1]:
            raise EngineError(f"order {self.number} of the driver has {len(pages)} pages where {ends[-1]} are needed")
        return tuple(np.split(pages, ends[:-1]))


class JointOrder(msgspec.Struct, frozen=True, array_like=True, tag="joint", gc=False):
    """A step that the ranks of all drivers compute together. The StepOrder of this driver follows if it has tokens."""

    # Tokens of each driver's requests.
    num_tokens: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
# Messages from a driver to its followers.
AnyOrder = StepOrder | JointOrder | CopyOrder
_decoder: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)


def encode(order: AnyOrder) -> bytes:
    return _encoder.encode(order)


def decode(order: bytes) -> AnyOrder:
    """Return the order. Raises EngineError if it cannot be read."""
    try:
        return _decoder.decode(order)
    except msgspec.MsgspecError as error:
        raise EngineError(f"an order of the driver cannot be read: {error}") from error


def marked_as_draft(send: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that sends an order with the mark of the draft model."""
    return lambda order: send(_DRAFT_MARK + order)


def step_order(
    number: int, plan: StepPlan, batch: PagedBatch, sampled: npt.NDArray[np.int64], head_rows: Sequence[Sequence[int]]
) -> StepOrder:
    """Build the order of a step. `sampled`: the last sampled token, by row of the page table."""
    token_ids = np.concatenate([np.asarray(r.token_ids, dtype=np.int64) for r in plan.requests])
    last = [r.row for r in plan.requests if r.token_ids[0] == LAST_SAMPLED]
    if last:
        token_ids[token_ids == LAST_SAMPLED] = sampled[last]
    return StepOrder(
        number=number,
        token_ids=token_ids.tobytes(),
        starts=batch.starts.tobytes(),
        lengths=batch.lengths.tobytes(),
        pages=_joined(batch.pages),
        head_rows=tuple(np.array(rows, dtype=np.int64).tobytes() for rows in head_rows),
        window_pages=None if batch.window_pages is None else _joined(batch.window_pages),
    )


class JointOrders:
    """Orders of one driver, sent when the drivers of all groups have joined the step. `send`: to its followers.

    Used by one thread.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        # Order of a step that has not begun. None: this driver has no tokens in the next step.
        self._held: bytes | None = None

    def hold(self, order: bytes) -> None:
        self._held = order

    def release(self, num_tokens: tuple[int, ...]) -> None:
        """Send the step, given the number of tokens of each driver. Raises EngineError."""
        held, self._held = self._held, None
        self._send(encode(JointOrder(num_tokens)))
        if held is not None:
            self._send(held)


def _joined(pages: Sequence[IntArray]) -> bytes:
    return np.concatenate(pages).astype(np.int32).tobytes()


def array(data: bytes) -> IntArray:
    """Return an array of an order's bytes; a copy that may be written to."""
    return np.frombuffer(data, dtype=np.int64).copy()


def body_and_head(loaded: LoadedModel) -> tuple[Callable[..., torch.Tensor | None], Callable[..., torch.Tensor]]:
    """Return the functions of a model that a step calls. If its weights are released, both raise EngineError."""
    if loaded.model is None:
        return _without_weights, _without_weights
    if (plain := PlainDecoder.of(loaded.model)) is not None:
        return plain.body, plain.head
    return loaded.body(), LanguageHead(loaded.model)


def _without_weights(*_args: object) -> NoReturn:
    raise EngineError("the weights are released: POST /resume_memory_occupation to this worker first")


class FollowerRunner:
    """Runner of the driver's orders, in the order of their numbers. In one thread."""

    def __init__(
        self, loaded: LoadedModel, attention: AttentionBackend, page_size: int, copies: FollowerCopies
    ) -> None:
        self._attention = attention
        self._copies = copies
        self._page_size = page_size
        self._device = loaded.device
        self._next = 0
        self.use(loaded)

    def use(self, loaded: LoadedModel) -> None:
        """Compute later steps with `loaded`, which has the same shape. No step may run while it has no model."""
        self._body, self._head = body_and_head(loaded)
        self._model = loaded.model
        # Exchange with the ranks of other drivers. None: these compute their steps independently.
        self._meeting = loaded.share.meeting if loaded.share else None

    def run(self, order: bytes) -> None:
        """Execute this rank's share of one order. After an EngineError the ranks are out of step: end the process."""
        try:
            with torch.inference_mode():
                self._run(order)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"A step of the driver failed on this rank: {type(error).__name__}: {error}") from error

    def _run(self, data: bytes) -> None:
        order = decode(data)
        if isinstance(order, JointOrder):
            self._join(order)
            return
        if not isinstance(order, StepOrder):
            self._copies.run(order)
            return
        if order.number != self._next:
            raise EngineError(f"order {order.number} of the driver came where {self._next} was to come")
        self._next += 1
        batch = order.batch(self._page_size)
        token_ids = to_device(array(order.token_ids), self._device).unsqueeze(0)
        positions = to_device(batch.positions, self._device).unsqueeze(0)
        hidden = self._body(token_ids, positions, self._attention.plan(batch))
        if hidden is not None:
            for rows in order.head_rows:
                # The call itself sends this rank's part to the driver.
                self._head(hidden[to_device(array(rows), self._device)])
        wait_for(self._device)

    def _join(self, order: JointOrder) -> None:
        if self._meeting is None:
            raise EngineError("the driver sent a JointOrder, and this rank shares no experts with other drivers")
        self._meeting.begin(order.num_tokens)
        if self._meeting.num_own == 0:
            take_part(self._model)
            wait_for(self._device)


class DraftingFollower:
    """Runner of the driver's orders for two models: the served one and the draft model."""

    def __init__(self, target: FollowerRunner, draft: FollowerRunner) -> None:
        self._target = target
        self._draft = draft

    def run(self, order: bytes) -> None:
        """Compute this rank's share of one step, as `FollowerRunner.run`."""
        if order.startswith(_DRAFT_MARK):
            self._draft.run(order[len(_DRAFT_MARK) :])
        else:
            self._target.run(order)
