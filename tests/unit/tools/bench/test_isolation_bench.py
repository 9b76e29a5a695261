"""`bench isolation`: scenarios on a fake server, turns of the systems, and verdicts on made-up figures."""

import asyncio
import datetime
import io
import json
import zlib
from contextlib import contextmanager, suppress

import pytest
from aiohttp import web
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench import isolation as isolation_bench
from splitserve.tools.bench.isolation import (
    ADAPTIVE,
    FIXED,
    PAIR,
    IsolationSizes,
    isolation_report,
    measure_rounds,
    scenarios_of,
    sizes_for,
)
from splitserve.tools.bench.load import Endpoint
from splitserve.tools.bench.options import IsolationBenchOptions
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.scenarios import IsolationPlan, PromptBatch, figures_of, measure_isolation
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.bench.systems import Running, Server
from splitserve.tools.bench.workload import PromptMaker
from splitserve.tools.client import RequestFailedError
from support.fake_openai import FakeOpenAI

OPTIONS = IsolationBenchOptions(model="/no/such/model")
SMALL = IsolationSizes(
    rounds=2,
    interference=IsolationPlan(),
    idle_tokens=(8, 16),
    idle_prompts=1,
    decode_streams=(2, 3),
    decode_tokens=4,
    mixed_requests=4,
    mixed_concurrency=2,
    mixed_tokens=(6, 3),
)


def words(text):
    return [zlib.crc32(word.encode()) % 50_000 for word in text.split()]


async def test_each_scenario_has_its_load_and_its_figures():
    api = FakeOpenAI()
    async with api.serving() as url:
        endpoint, prompts = Endpoint(url, "m"), PromptMaker(words)
        found = {}
        for scenario in scenarios_of(SMALL):
            if isinstance(scenario, PromptBatch):
                found |= scenario.figures([await asyncio.to_thread(scenario.run, endpoint, prompts, 10.0)])
    assert set(found) == {"idle_ttft_8", "idle_ttft_16", "decode_2", "decode_3", "mixed"}
    assert all(value > 0 for value in found.values())
    shapes = [(len(body["prompt"]), body["max_tokens"]) for body in api.bodies]
    assert shapes == [(8, 1), (16, 1), *[(128, 4)] * 5, *[(6, 3)] * 4]


class AnswersLongPromptsLate(FakeOpenAI):
    """It answers a long prompt `delay` seconds after its arrival."""

    delay = 0.0

    async def _stream(self, request, body):
        if len(body["prompt"]) == 8:
            await asyncio.sleep(self.delay)
        return await super()._stream(request, body)


async def test_the_loaded_window_lasts_until_every_long_prompt_is_answered():
    api = AnswersLongPromptsLate()
    async with api.serving() as url:
        # A machine may be too busy for tokens in a short window.
        for window in (0.05, 0.5, 5.0, 50.0):
            # The streams do not end by themselves.
            plan = IsolationPlan(
                num_streams=1,
                window=window,
                interval=window / 2.5,
                stream_output_tokens=10**7,
                long_prompt_tokens=8,
            )
            api.delay = 2 * window
            with suppress(RequestFailedError):
                found = await measure_isolation(Endpoint(url, "m"), plan, PromptMaker(words), timeout=60.0)
                break
    assert found["num_long_prompts"] == plan.num_long_prompts == 2
    assert found["ttft_p50"] > plan.window


class RejectsFirstLongPrompt(FakeOpenAI):
    async def _stream(self, request, body):
        if len(self.bodies) == 2:
            return web.json_response({"error": {"message": "no room"}}, status=503)
        return await super()._stream(request, body)


async def test_a_long_prompt_that_fails_is_an_error_because_the_streams_ran_without_it():
    plan = IsolationPlan(num_streams=1, window=0.2, interval=0.1, stream_output_tokens=10**7, long_prompt_tokens=8)
    async with RejectsFirstLongPrompt().serving() as url:
        with pytest.raises(RequestFailedError, match="no room"):
            await measure_isolation(Endpoint(url, "m"), plan, PromptMaker(words), timeout=60.0)


def system(name, log) -> Server:
    @contextmanager
    def running(console):
        yield Running(RecordingEndpoint("", name, log=log), pool_tokens=1000)

    return Server(name, "1", running)


class RecordingEndpoint:
    def __init__(self, url, name, log):
        self.name, self._log = name, log

    def ask(self, prompts, max_tokens, timeout, concurrency=None):
        self._log.append((self.name, [prompt.ids for prompt in prompts]))
        return []


def test_systems_take_turns_with_equal_prompts(monkeypatch):
    log = []
    scenarios = [PromptBatch(name, 1, 5, 1, 1, lambda runs, name=name: {name: 1.0}) for name in ("one", "two")]
    monkeypatch.setattr(isolation_bench, "scenarios_of", lambda sizes: scenarios)
    names = [FIXED, ADAPTIVE, PAIR]
    rounds = measure_rounds([system(name, log) for name in names], SMALL, words, 1.0, Console(file=io.StringIO()))
    assert rounds == {name: [{"one": 1.0, "two": 1.0}] * 2 for name in names}
    # Each pool is filled, then each system warms up.
    assert [(name, sum(map(len, prompts)) >= 1000) for name, prompts in log[:6:2]] == [(name, True) for name in names]
    measured = log[6:]
    assert [name for name, _ in measured] == names * 4
    for i in range(0, len(measured), 3):
        assert measured[i][1] == measured[i + 1][1] == measured[i + 2][1]
    assert measured[0][1] != measured[3][1]


def figures(**changed):
    interference = figures_of(
        [StreamRecord(0.0, [float(i) for i in range(40)], arrived=[1] * 40)],
        [StreamRecord(0.0, [25.0])],
        IsolationPlan(),
        10.0,
        20.0,
        30.0,
    )
    names = [*interference, "idle_ttft_1024", "idle_ttft_2048", "decode_8", "decode_32", "mixed"]
    return dict.fromkeys(names, 1.0) | changed


def report(**of_pair):
    rounds = {
        FIXED: [figures(loaded_itl_p99=2.0)],
        ADAPTIVE: [figures(loaded_itl_p99=0.4, ttft_p50=1.4)],
        PAIR: [figures(**of_pair)],
    }
    return isolation_report(OPTIONS, sizes_for(OPTIONS), dict.fromkeys(rounds, "2"), rounds)


def test_each_target_is_met_or_not():
    found = report(idle_ttft_2048=1.2, decode_32=0.94, quiet_itl_p99=0.5)
    outcomes = {outcome["target"]: outcome["met"] for outcome in json.loads(json.dumps(found.figures))["targets"]}
    assert outcomes == {
        "pair: idle TTFT of 1,024 tokens / colocated": True,
        "pair: idle TTFT of 2,048 tokens / colocated": False,
        "pair: ITL p99 with prompts / without": True,
        "pair: decode at 8 streams / colocated": True,
        "pair: decode at 32 streams / colocated": False,
        "pair: mixed load / colocated": True,
        "adaptive: ITL p99 with prompts / fixed chunk": True,
        "adaptive: TTFT p50 of prompts / fixed chunk": False,
    }
    assert not found.failed


def test_the_report_has_ratios_to_the_fixed_chunk_and_the_verdicts():
    section = report(idle_ttft_2048=1.2).markdown(datetime.date(2031, 2, 3))
    assert "| idle TTFT of 2,048 tokens, ms | 1,000 | 1,000 (1.00) | 1,200 (1.20) |" in section
    assert "| ITL p99 with prompts, ms | 2,000 | 400 (0.20) | 1,000 (0.50) |" in section
    assert "| pair: idle TTFT of 2,048 tokens / colocated | 1.20 | at most 1.1 | not met |" in section


def test_figures_are_medians_of_the_rounds():
    rounds = {name: [figures(mixed=value) for value in (1.0, 9.0, 2.0)] for name in (FIXED, ADAPTIVE, PAIR)}
    found = isolation_report(OPTIONS, sizes_for(OPTIONS), dict.fromkeys(rounds, "2"), rounds)
    assert [system["figures"]["mixed"] for system in found.figures["systems"]] == [2.0] * 3


def test_quick_makes_one_round_unless_more_are_wanted():
    assert [sizes_for(IsolationBenchOptions(**o)).rounds for o in ({}, {"quick": True}, {"rounds": 5})] == [3, 1, 5]


def test_an_unknown_backend_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="--transfer-backend"):
        run_bench(IsolationBenchOptions(transfer_backend="pigeon"), isolation_bench.bench_isolation)
