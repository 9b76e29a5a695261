"""Scheduler process without a model, for tests of its front end: `python -m support.fake_scheduler`.

It exchanges the real messages over the real pipes. It answers a request with the prompt's first token, repeated. Its
argument selects a failure at startup, the prompt's first token a failure of the request.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import msgspec
import zmq

from splitserve.core.errors import USAGE_EXIT_CODE
from splitserve.core.messages import (
    AbortRequest,
    FlushCacheReply,
    FlushCacheRequest,
    FromScheduler,
    GenerateRequest,
    RoleReply,
    RoleRequest,
    RoleStep,
    SchedulerFailed,
    SchedulerReady,
    SchedulerState,
    StateReply,
    StateRequest,
    StepOutputs,
    TokenOutput,
    ToScheduler,
    decode_to_scheduler,
    encode,
)
from splitserve.core.request import FinishReason, FinishType
from splitserve.ranks.scheduler_start import SchedulerStart

# First prompt tokens that select a failure: the process dies; one token, then nothing until the request is aborted.
DIE_TOKEN, HANG_TOKEN = 1, 2
DEATH_CODE = 7
# Arguments, in order: be ready at once; report that this start, or every start, fails; die during startup; never get
# ready; on every rank but 0, reject the change of role; be ready, but ignore the end of the input, as inside a
# collective; follow another rank and never serve; never get ready, beside followers that report a failed start;
# be ready, beside a front end that gets SIGINT in a callback of the interpreter while it loads the tokenizer.
READY, REFUSE, REFUSE_ALWAYS, CRASH = "ready", "refuse", "refuse-always", "crash"
LOAD_FOREVER, SPLIT = "load-forever", "split"
STUCK, FOLLOW, FOLLOWER_REFUSES, SIGNAL = "stuck", "follow", "follower-refuses", "signal"
# Submission of the last request with each rid.
_submissions: dict[str, int] = {}


def main() -> None:
    scenario = sys.argv[1]
    if not (line := sys.stdin.buffer.readline()):
        # The front end ended before it sent the configuration.
        return
    start = msgspec.json.decode(line, type=SchedulerStart)
    if scenario != STUCK:
        threading.Thread(target=_end_with_input, daemon=True).start()
    if scenario == CRASH:
        os._exit(DEATH_CODE)
    if scenario in (LOAD_FOREVER, FOLLOW, FOLLOWER_REFUSES):
        threading.Event().wait()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outbox.connect(start.from_scheduler)
    if scenario in (REFUSE, REFUSE_ALWAYS):
        exit_code = 1 if scenario == REFUSE else USAGE_EXIT_CODE
        outbox.send(encode(SchedulerFailed(message="the model does not fit", exit_code=exit_code)))
        context.destroy(linger=1000)
        sys.exit(1)
    inbox.connect(start.to_scheduler)
    outbox.send(encode(_ready()))
    refuses_role = scenario == SPLIT and start.rank.dp_rank > 0
    while True:
        for reply in _replies(decode_to_scheduler(inbox.recv()), refuses_role=refuses_role):
            outbox.send(encode(reply))


def _end_with_input() -> None:
    # Read the descriptor, not sys.stdin: a thread that holds its lock makes the interpreter abort at shutdown.
    while os.read(0, 4096):
        pass
    os._exit(0)


def _replies(message: ToScheduler, *, refuses_role: bool) -> Iterator[FromScheduler]:
    match message:
        case GenerateRequest(prompt_ids=[first, *_]):
            if first == DIE_TOKEN:
                os._exit(DEATH_CODE)
            hangs = first == HANG_TOKEN
            ids = [first] * (1 if hangs else message.params.max_new_tokens)
            finish = None if hangs else FinishReason(FinishType.LENGTH)
            _submissions[message.rid] = message.submission
            output = TokenOutput(rid=message.rid, submission=message.submission, token_ids=ids, finish=finish)
            yield StepOutputs(outputs=[output])
        case AbortRequest(quiet=False):
            finish = FinishReason(FinishType.ABORT, message=message.message, status_code=499, reason="aborted")
            submission = _submissions.pop(message.rid, 0)
            yield StepOutputs(outputs=[TokenOutput(rid=message.rid, submission=submission, finish=finish)])
        case FlushCacheRequest():
            yield FlushCacheReply(call_id=message.call_id, num_pages_freed=0)
        case RoleRequest():
            error = "no memory" if refuses_role and message.step is RoleStep.COMMIT else ""
            yield RoleReply(call_id=message.call_id, error=error, status_code=503 if error else 200)
        case StateRequest():
            state = SchedulerState(
                page_size=16, pages_total=8, pages_free=8, pages_cached=0, pages_leased=0, rows_total=8, rows_free=8
            )
            yield StateReply(call_id=message.call_id, state=state)


def _ready() -> SchedulerReady:
    return SchedulerReady(
        max_total_tokens_per_request=4096,
        vocab_size=16,
        pages_total=8,
        page_size=16,
        dtype="float32",
        kv_bytes_per_token=1,
        device="cpu",
        num_parameters=0,
        load_seconds=0.0,
    )


if __name__ == "__main__":
    main()
