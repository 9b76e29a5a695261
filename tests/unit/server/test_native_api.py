from __future__ import annotations

import itertools
import json
import re
from typing import Any

import httpx
import pytest

from splitserve.core.messages import SpeculationStats
from splitserve.core.request import FinishReason, FinishType, RoomKey

from .conftest import StartWorker, Worker
from .server_fakes import SteppedScheduler


def failure(status: int, reason: str) -> FinishReason:
    return FinishReason(FinishType.ABORT, message="it failed", status_code=status, reason=reason)


async def generate(worker: Worker, status: int = 200, **body: Any) -> Any:
    response = await worker.http.post("/generate", json=body)
    assert response.status_code == status, response.text
    return response.json()


def frames_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(e.removeprefix("data: ")) for e in events[:-2]]


async def stream(worker: Worker, **body: Any) -> list[Any]:
    return frames_of(await worker.http.post("/generate", json=body | {"stream": True}))


async def test_a_text_is_answered_with_text_ids_and_meta_info(worker: Worker) -> None:
    answer = await generate(worker, text="héy", sampling_params={"max_new_tokens": 4}, rid="r1")
    assert answer["text"] == "héy"
    assert answer["output_ids"] == worker.front.tokenizer.encode("héy")
    meta = answer["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 4, 3)
    assert meta["e2e_latency"] >= 0
    assert meta["timeline"]["running"] == 0.25
    assert "kv_transfer" not in meta


async def test_an_answer_says_what_speculation_did_for_it(worker: Worker) -> None:
    worker.scheduler.speculation = SpeculationStats(num_verify_steps=4, num_proposed_tokens=16, num_accepted_tokens=6)
    meta = (await generate(worker, text="a"))["meta_info"]
    assert (meta["spec_verify_ct"], meta["spec_draft_token_num"], meta["spec_accept_token_num"]) == (4, 16, 6)
    assert (meta["spec_accept_rate"], meta["spec_accept_length"]) == (0.375, 2.5)


async def test_input_ids_are_taken_as_they_are(worker: Worker) -> None:
    answer = await generate(worker, input_ids=[65, 66], sampling_params={"max_new_tokens": 3})
    assert answer["output_ids"] == [65, 66, 65]


async def test_the_default_is_128_new_tokens(worker: Worker) -> None:
    assert (await generate(worker, text="a"))["meta_info"]["completion_tokens"] == 128


async def test_output_is_clamped_to_the_room_in_the_context(worker: Worker) -> None:
    answer = await generate(worker, input_ids=[1] * 250, sampling_params={"max_new_tokens": 1000})
    assert answer["meta_info"]["completion_tokens"] == 6


async def test_the_stop_tokens_text_is_left_out(worker: Worker) -> None:
    answer = await generate(worker, input_ids=[40, 41, 257])
    assert answer["output_ids"] == [40, 41, 257]
    assert answer["text"] == worker.front.tokenizer.decode([40, 41])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}


async def test_a_stop_token_is_shown_where_asked_for(worker: Worker) -> None:
    params = {"stop_token_ids": [41], "no_stop_trim": True}
    answer = await generate(worker, input_ids=[40, 41], sampling_params=params)
    assert answer["text"] == worker.front.tokenizer.decode([40, 41])


async def test_a_stop_string_ends_the_answer_and_the_schedulers_work(worker: Worker) -> None:
    worker.scheduler.hold_after = 6
    answer = await generate(worker, text="say END now", sampling_params={"stop": ["nope", " E"]})
    assert answer["text"] == "say"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": " E"}
    assert answer["meta_info"]["completion_tokens"] == 5
    abort = await worker.scheduler.aborts.get()
    assert abort.quiet
    assert worker.front.requests.num_open_samples == 0
    # The scheduler sent no final message.
    assert list(answer["meta_info"]["timeline"]) == ["received", "waiting", "running", "finished"]
    metrics = (await worker.http.get("/metrics")).text
    assert re.search(r'splitserve:request_stage_seconds_count\{.*stage="decode".*\} 1\.0', metrics)


async def test_only_the_last_frame_has_the_times_of_its_stages_and_its_speculation(worker: Worker) -> None:
    worker.front.scheduler = SteppedScheduler()
    frames = await stream(worker, text="say END now", sampling_params={"stop": ["END"]})
    assert len(frames) > 1
    have = [{"timeline", "spec_verify_ct"} & frame["meta_info"].keys() for frame in frames]
    assert have == [set()] * (len(frames) - 1) + [{"timeline", "spec_verify_ct"}]


async def test_a_stream_carries_cumulative_text_and_ends_with_done(worker: Worker) -> None:
    body: dict[str, Any] = {"text": "a🙂b", "sampling_params": {"max_new_tokens": 6}}
    frames = await stream(worker, **body)
    texts = [f["text"] for f in frames]
    assert texts[-1] == "a🙂b" == (await generate(worker, **body))["text"]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert "\ufffd" not in "".join(texts)
    assert [f["meta_info"]["finish_reason"] for f in frames[:-1]] == [None] * (len(frames) - 1)
    assert frames[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert "index" not in frames[0]


async def test_a_batch_is_answered_by_a_list_in_order(worker: Worker) -> None:
    answers = await generate(
        worker, text=["one", "two"], sampling_params=[{"max_new_tokens": 3}, {"max_new_tokens": 2}], rid=["x", "y"]
    )
    assert [a["text"] for a in answers] == ["one", "tw"]
    assert [a["meta_info"]["id"] for a in answers] == ["x", "y"]


async def test_a_streamed_batch_names_the_sample_of_each_frame(worker: Worker) -> None:
    frames = await stream(worker, text=["one", "two"], sampling_params={"max_new_tokens": 3, "n": 2})
    last = {f["index"]: f["text"] for f in frames}
    assert last == {0: "one", 1: "one", 2: "two", 3: "two"}


async def test_n_samples_draw_with_different_seeds(worker: Worker) -> None:
    answers = await generate(worker, text="ab", sampling_params={"n": 3, "seed": 9, "max_new_tokens": 1}, rid="r")
    assert [a["meta_info"]["id"] for a in answers] == ["r-0", "r-1", "r-2"]
    assert len({r.params.seed for r in worker.scheduler.received}) == 3
    assert worker.scheduler.received[0].params.seed == 9


async def test_requests_without_a_seed_get_different_ones(worker: Worker) -> None:
    for _ in range(2):
        await generate(worker, text=["ab", "ab"], sampling_params={"max_new_tokens": 1})
    assert len({r.params.seed for r in worker.scheduler.received}) == 4


async def test_logprobs_are_lists_of_logprob_id_and_text(worker: Worker) -> None:
    answer = await generate(
        worker,
        input_ids=[65, 66, 67],
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta, text = answer["meta_info"], worker.front.tokenizer.token_text
    assert meta["output_token_logprobs"] == [[-0.5, 65, text(65)], [-0.5, 66, text(66)]]
    assert meta["input_token_logprobs"] == [[None, 65, text(65)], [-0.25, 66, text(66)], [-0.25, 67, text(67)]]
    assert meta["output_top_logprobs"] == [[[-1.0, 0, text(0)], [-2.0, 1, text(1)]]] * 2
    assert meta["input_top_logprobs"] == [None, [], []]


async def test_input_logprobs_are_empty_unless_a_start_is_given(worker: Worker) -> None:
    params = {"max_new_tokens": 1}
    meta = (await generate(worker, input_ids=[65, 66], sampling_params=params, return_logprob=True))["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[-0.5, 65, None]]
    assert "output_top_logprobs" not in meta
    assert worker.scheduler.received[0].logprob_start is None


async def test_a_failed_request_is_answered_with_the_schedulers_status_and_message(worker: Worker) -> None:
    worker.scheduler.fail_with = failure(500, "peer_lost")
    for is_stream in (False, True):
        response = await worker.http.post("/generate", json={"text": "a", "stream": is_stream, "rid": "r"})
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "it failed",
            "type": "server_error",
            "param": None,
            "code": "peer_lost",
        }


async def test_a_failure_in_the_midst_of_a_stream_is_a_frame_with_the_error(live_worker: Worker) -> None:
    worker = live_worker
    worker.scheduler.hold_after = 1
    async with worker.http.stream("POST", "/generate", json={"text": "abcdef", "stream": True}) as response:
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["text"] == "a"
        worker.scheduler.fail_with = failure(500, "engine_error")
        worker.scheduler.fail_after, worker.scheduler.hold_after = 1, None
        await worker.front.scheduler.states()
        rest = [line async for line in lines if line]
    assert json.loads(rest[0].removeprefix("data: "))["error"]["code"] == "engine_error"
    assert rest[1:] == ["data: [DONE]"]
    assert worker.front.requests.num_open_samples == 0


async def test_a_failed_sample_fails_the_request_and_aborts_the_others(worker: Worker) -> None:
    worker.scheduler.fail_with = failure(500, "engine_error")
    worker.scheduler.fail_after = 2
    await generate(worker, 500, text=["ab", "cd"])
    await worker.front.scheduler.states()
    assert worker.scheduler.num_running == 0
    assert worker.front.requests.num_open_samples == 0


@pytest.mark.parametrize("room", [[5, 6, 7, 8], [5, 6], 5])
async def test_a_pd_worker_gives_every_sample_a_key_of_its_own(start_worker: StartWorker, room: Any) -> None:
    async with start_worker("decode") as worker:
        params = {"n": 2, "max_new_tokens": 1}
        await generate(worker, text=["a", "b"], sampling_params=params, bootstrap_host="h", bootstrap_room=room)
        infos = [r.bootstrap for r in worker.scheduler.received]
        assert len({i.key for i in infos if i}) == 4
        assert {(i.host, i.port) for i in infos if i} == {("h", 8998)}


async def test_a_prefill_worker_answers_with_one_token_and_its_transfer(start_worker: StartWorker) -> None:
    async with start_worker("prefill", bootstrap_port=4711) as worker:
        worker.scheduler.ends_after_one = True
        # A stop string that the first token completes must not end the hand-over.
        params = {"max_new_tokens": 50, "min_new_tokens": 7, "stop": ["a"]}
        answer = await generate(worker, text="ab", sampling_params=params, bootstrap_room=3, bootstrap_port=None)
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
        assert answer["meta_info"]["kv_transfer"] == {
            "bytes": 2 * 10**9,
            "writes": 0,
            "pages_exchanged": 0,
            "seconds": 0.5,
            "exposed_seconds": 0.1,
            "gb_per_s": 4.0,
        }
        (request,) = worker.scheduler.received
        assert (request.params.max_new_tokens, request.params.min_new_tokens) == (50, 7)
        assert request.bootstrap is not None
        assert (request.bootstrap.port, request.bootstrap.key) == (4711, RoomKey(3))


SCORED = {"text": "ab", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}


async def test_a_decode_worker_scores_a_prompt_that_it_computes_itself(start_worker: StartWorker) -> None:
    async with start_worker("decode") as worker:
        answer = await generate(worker, **SCORED, local_prefill=True)
        assert [
            token_id for _, token_id, _ in answer["meta_info"]["input_token_logprobs"]
        ] == worker.front.tokenizer.encode("ab")


async def test_a_decode_worker_leaves_the_prompts_logprobs_to_the_prefill(start_worker: StartWorker) -> None:
    async with start_worker("decode") as worker:
        answer = await generate(worker, **SCORED, bootstrap_host="h", bootstrap_room=3)
        assert answer["meta_info"]["input_token_logprobs"] == []
        assert worker.scheduler.received[0].logprob_start is None
