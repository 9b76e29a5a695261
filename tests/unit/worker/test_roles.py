"""What roles share and what each of them needs: caches kept where they are right, memory and bounds of the new role."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from splitserve.core.clock import ManualClock
from splitserve.core.config import CacheConfig, DisaggregationConfig, ModelConfig, ServerConfig, WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.kv_events import KVEventsConfig
from splitserve.core.limits import LimitsConfig
from splitserve.core.options import size_text
from splitserve.core.request import DisaggregationMode, Request
from splitserve.core.sampling import ResolvedSampling
from splitserve.engine.build import BuiltEngine, build_engine
from splitserve.observe.events.publisher import NullEventPublisher
from splitserve.ranks.group import RankPlace
from splitserve.scheduler.parts import OpenTransfer, SchedulerParts, WorkerPorts
from splitserve.scheduler.roles.role import Role
from splitserve.transfer.metadata import RowWidths
from splitserve.worker.role_switch import OwnBootstrap
from splitserve.worker.scheduler_process import engine_port, transfer_opener
from support.fake_grammar import FakeCompiler
from support.sim import ListInbox
from support.tiny_models import make_tiny_model

NULL, PREFILL, DECODE = DisaggregationMode.NULL, DisaggregationMode.PREFILL, DisaggregationMode.DECODE
PAGE_SIZE, NUM_PAGES = 4, 32
PROMPT = list(range(24))


class World:
    """A worker's shared parts over a real pool, without anything that runs steps."""

    def __init__(self, engine: BuiltEngine, closing: ExitStack, cache: CacheConfig, **disaggregation: Any) -> None:
        self.config = WorkerConfig(
            cache=cache,
            disaggregation=DisaggregationConfig(**disaggregation),
            kv_events=KVEventsConfig(publisher="zmq"),
        )
        self.engine, self.closing = engine, closing
        pool = ThreadPoolExecutor(1)
        ports = WorkerPorts(
            inbox=ListInbox(),
            send=lambda message: None,
            wake=lambda: None,
            clock=ManualClock(),
            publisher=NullEventPublisher(),
            open_transfer=self.open_transfer(self.config),
            compiler=FakeCompiler(),
            step_thread=pool,
            grammar_pool=pool,
            role_thread=pool,
        )
        self.roles = SchedulerParts(self.config, engine_port(engine, RankPlace()), ports)
        self.cache, self.record = self.roles.cache, self.roles.record

    def open_transfer(self, config: WorkerConfig) -> OpenTransfer:
        return transfer_opener(config, self.engine, RankPlace(), lambda: None)

    async def become(self, mode: DisaggregationMode) -> Role:
        """The role before stays open, because no process in this test listens to it."""
        url = None
        if mode is PREFILL:
            bootstrap = OwnBootstrap(self.config.disaggregation)
            self.closing.callback(bootstrap.close)
            url = await bootstrap.open(0)
        prepared = self.roles.prepare(mode, url)
        self.closing.callback(prepared.closing.close)
        role = self.roles.install(prepared)
        assert role.mode is mode
        self.cache.check([])
        return role

    def compute(self) -> None:
        """Serve one request: compute its prompt and leave it to the cache."""
        request = Request("r", PROMPT, ResolvedSampling())
        assert self.cache.try_admit(request, num_tokens=len(PROMPT))
        assert self.cache.extend(request, len(PROMPT))
        request.num_computed_tokens = len(PROMPT)
        self.cache.release(request, publish=True)

    @property
    def num_cached(self) -> int:
        """Number of pages. The recorded events describe the same pages."""
        assert self.record is not None
        assert len(self.record.blocks()) == self.cache.prefix.num_pages
        return self.cache.prefix.num_pages


MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(make_tiny_model(name, folder / name)) for name in ("llama", "gemma3")}


@pytest.fixture
def make_world(folders: dict[str, str]) -> Iterator[MakeWorld]:
    with ExitStack() as closing:

        def make(model: str = "llama", *, cache: CacheConfig | None = None, **disaggregation: Any) -> World:
            memory = CacheConfig(page_size=PAGE_SIZE, max_total_tokens=NUM_PAGES * PAGE_SIZE)
            engine = build_engine(ModelConfig(model=folders[model], dtype="float32"), memory)
            closing.callback(engine.close)
            return World(engine, closing, cache or memory, **disaggregation)

        yield make


async def test_cached_prefixes_stay_whatever_the_worker_becomes(make_world: MakeWorld) -> None:
    world = make_world()
    await world.become(DECODE)
    world.compute()
    for mode in (PREFILL, NULL, DECODE, NULL, PREFILL):
        await world.become(mode)
        assert world.num_cached == 6


async def test_where_decode_keeps_no_prefixes_they_are_forgotten(make_world: MakeWorld) -> None:
    # Prefill sends the part of a sliding window that one request will read, also if decode must keep none.
    memory = CacheConfig(page_size=PAGE_SIZE, enable_decode_prefix_cache=False)
    for world in (make_world("gemma3"), make_world(cache=memory)):
        await world.become(PREFILL)
        world.compute()
        assert world.num_cached == 6
        await world.become(DECODE)
        world.compute()
        assert world.num_cached == 0
        await world.become(PREFILL)
        assert world.num_cached == 0
        world.compute()
        assert world.num_cached == 6


async def test_what_came_in_a_narrower_dtype_is_no_prefill_workers_to_give(make_world: MakeWorld) -> None:
    world = make_world(transfer_dtype="bfloat16")
    await world.become(DECODE)
    world.compute()
    await world.become(PREFILL)
    assert world.num_cached == 0
    world.compute()
    await world.become(DECODE)
    assert world.num_cached == 6


async def test_the_tier_in_host_memory_is_there_for_roles_that_compute_prompts(make_world: MakeWorld) -> None:
    memory = CacheConfig(page_size=PAGE_SIZE, prefix_host_memory=1 << 20)
    world = make_world(cache=memory)
    await world.become(NULL)
    assert world.cache.host is not None
    world.compute()
    tier = world.cache.host
    await world.become(PREFILL)
    assert world.cache.host is tier
    await world.become(DECODE)
    assert (world.cache.host, world.num_cached) == (None, 6)
    await world.become(NULL)
    assert world.cache.host is not None


async def test_a_prefill_worker_promises_room_for_prompts_and_others_for_answers_too(make_world: MakeWorld) -> None:
    world = make_world()
    request = Request("r", PROMPT, ResolvedSampling(max_new_tokens=10))
    for mode, num_tokens in ((PREFILL, 24), (NULL, 34), (DECODE, 34), (PREFILL, 24)):
        running = (await world.become(mode)).running
        assert running.admission.num_tokens_at_most(request) == num_tokens
        # Of a step: decode leaves time to those that generate.
        assert running.prompt_budget == (256 if mode is DECODE else 2048)
        # Nothing decodes on a prefill worker: its chunks have a fixed size.
        assert (running.chunks is None) == (mode is PREFILL)


async def test_a_role_that_cannot_be_prepared_leaves_nothing_open(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    await world.become(DECODE)
    closed: list[str] = []
    monkeypatch.setattr("splitserve.transfer.transports.tcp.SessionTransport.close", lambda _: closed.append("x"))
    with pytest.raises(ConfigError, match="bootstrap server"):
        world.roles.prepare(PREFILL, None)
    assert closed == ["x"]
    # No address but loopback without a token; no null worker in a pool that pages change owner in.
    config = world.config
    for wrong, mode, words in (
        (DisaggregationConfig(host="192.0.2.1"), DECODE, "cluster-token-file"),
        (DisaggregationConfig(transfer_backend="cuda_ipc"), PREFILL, "cuda_ipc"),
    ):
        open_transfer = world.open_transfer(msgspec.structs.replace(config, disaggregation=wrong))
        with pytest.raises(ConfigError, match=words), ExitStack() as closing:
            open_transfer(mode, "http://127.0.0.1:1", closing)
    open_transfer = world.open_transfer(msgspec.structs.replace(config, cache=CacheConfig(shared_pool="/dev/shm/pool")))
    with pytest.raises(ConfigError, match="--shared-pool"), ExitStack() as closing:
        open_transfer(NULL, None, closing)


def test_rows_of_metadata_follow_the_options(make_world: MakeWorld, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world()
    config = msgspec.structs.replace(
        world.config,
        model=ModelConfig(return_hidden_states=True),
        disaggregation=DisaggregationConfig(num_metadata_slots=3),
        server=ServerConfig(limits=LimitsConfig(max_top_logprobs=5)),
    )
    with caplog.at_level(logging.INFO), ExitStack() as closing:
        kit = world.open_transfer(config)(DECODE, None, closing)
        assert kit is not None
        assert (kit.metadata.size, kit.slots.size) == (3, 3)
        assert kit.metadata.widths == RowWidths(top_logprobs=5, hidden_state=world.engine.loaded.hidden_size)
    memory = size_text(3 * kit.metadata.row_bytes)
    assert f"rows=3 row_bytes={kit.metadata.row_bytes} memory={memory} top_logprobs=5 hidden_state=96" in caplog.text
