"""Output of the scheduler: tokens as they are sampled, and exactly one final message for each request."""

from __future__ import annotations

from collections.abc import Callable

from splitserve.core.clock import Clock
from splitserve.core.errors import RequestAbortedError, SplitserveError
from splitserve.core.messages import FromScheduler, SpeculationStats, StepOutputs, TokenOutput, TransferStats
from splitserve.core.request import FinishReason, FinishType, Request


class Outbox:
    """Collector of a step's outputs, which it sends as one message."""

    def __init__(self, send: Callable[[FromScheduler], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._outputs: list[TokenOutput] = []
        # rid -> output tokens sent to the front end; a request is open from `open` to its final message.
        self._told: dict[str, int] = {}
        self.num_finished = 0
        self.num_output_tokens = 0

    def open(self, request: Request) -> None:
        self._told[request.rid] = request.num_given_tokens

    def is_open(self, rid: str) -> bool:
        return rid in self._told

    def tell(self, request: Request, transfer: TransferStats | None = None) -> None:
        """Send the new tokens of this request; its last message if it is finished."""
        told = self._told[request.rid]
        new = request.output_ids[told:]
        self.num_output_tokens += len(new)
        finish = request.finish
        if finish is None:
            if not new:
                return
            self._told[request.rid] = told + len(new)
        first = told == request.num_given_tokens and bool(new) and request.logprob_start is not None
        self._outputs.append(
            TokenOutput(
                rid=request.rid,
                token_ids=new,
                logprobs=request.output_logprobs[told - request.num_given_tokens :] if request.return_logprob else [],
                input_logprobs=request.input_logprobs if first else None,
                num_cached_tokens=request.num_cached_tokens,
                finish=finish,
                timeline=self._close(request) if finish else None,
                transfer=transfer,
                speculation=_speculation_of(request) if finish else None,
            )
        )

    def fail(self, request: Request, error: SplitserveError) -> None:
        """End the request with `error`; its stage and id are part of the message."""
        stage = error.stage or request.timeline.stage
        message = f"request {request.rid} ended in stage '{stage}': {error.message}"
        request.finish = FinishReason(
            FinishType.ABORT, message=message, status_code=error.http_status, reason=error.reason, param=error.param
        )
        self.tell(request)

    def forget(self, request: Request) -> None:
        """End the request without a message, as the front end requested."""
        request.finish = FinishReason(FinishType.ABORT, reason=RequestAbortedError.reason)
        self._close(request)

    def reply(self, message: FromScheduler) -> None:
        """Reply to a call at once, after the outputs before it."""
        self.flush()
        self._send(message)

    def flush(self) -> None:
        if self._outputs:
            self._send(StepOutputs(outputs=self._outputs))
            self._outputs = []

    def _close(self, request: Request) -> dict[str, float]:
        del self._told[request.rid]
        self.num_finished += 1
        request.timeline.enter("finished", self._clock.now())
        return request.timeline.seconds_since_first()


def _speculation_of(request: Request) -> SpeculationStats | None:
    if request.num_verify_steps == 0:
        return None
    return SpeculationStats(
        num_verify_steps=request.num_verify_steps,
        num_proposed_tokens=request.num_proposed_tokens,
        num_accepted_tokens=request.num_accepted_tokens,
    )
