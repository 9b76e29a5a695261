"""Putting together what hands KV caches over: transport, control channel, directory, manager and its thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import urlsplit

from splitserve.clock import SystemClock
from splitserve.config import DisaggregationConfig
from splitserve.core.request import DisaggregationMode
from splitserve.disaggregation.control import ManagerThread, ZmqChannel
from splitserve.disaggregation.directory import HttpDirectory, register_rank
from splitserve.disaggregation.kit import HandOverKit
from splitserve.disaggregation.manager import KVManager
from splitserve.disaggregation.metadata import MetadataBuffers, ReqToMetadataIdxAllocator
from splitserve.disaggregation.transports import create_transport, needs_shareable_memory
from splitserve.disaggregation.transports.base import TransportOptions
from splitserve.disaggregation.waker import Waker
from splitserve.disaggregation.wire import KVArgs
from splitserve.engine.build import BuiltEngine
from splitserve.errors import ConfigError

# Seconds a prefill rank tries to reach the bootstrap server of its own worker.
REGISTER_TIMEOUT = 30.0


def open_hand_over(
    config: DisaggregationConfig,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    on_change: Callable[[], None],
    closing: ExitStack,
) -> HandOverKit:
    """Open the hand-over of a prefill or decode worker; `closing` ends it: first the thread, last the transport.

    `on_change` is called from the manager's thread when a room's state changed.
    """
    shareable = needs_shareable_memory(config.transfer_backend)
    metadata = MetadataBuffers(config.num_metadata_slots, shareable=shareable)
    waker = Waker()
    closing.callback(waker.close)
    options = TransportOptions(host=config.host, on_progress=waker.wake)
    transport = create_transport(config.transfer_backend, options)
    closing.callback(transport.close)
    transport.register([*engine.regions, metadata.region()])
    directory = None
    if config.mode is DisaggregationMode.DECODE:
        directory = HttpDirectory(waker.wake)
        closing.callback(directory.close)
    channel = ZmqChannel(config.host)
    manager = KVManager(
        config.mode,
        clock=SystemClock(),
        channel=channel,
        transport=transport,
        args=_kv_args(config, engine, metadata),
        metadata=metadata,
        config=config,
        directory=directory,
        wake=waker.wake,
    )
    thread = ManagerThread(manager, channel, waker, on_change)
    closing.callback(thread.close)
    thread.start()
    if config.mode is DisaggregationMode.PREFILL:
        _register(manager, bootstrap_url)
    return HandOverKit(thread, metadata, ReqToMetadataIdxAllocator(config.num_metadata_slots))


def _kv_args(config: DisaggregationConfig, engine: BuiltEngine, metadata: MetadataBuffers) -> KVArgs:
    return KVArgs(
        backend=config.transfer_backend,
        model=engine.fingerprint,
        layout=engine.layout,
        metadata_row_bytes=metadata.row_bytes,
        num_metadata_rows=metadata.size,
    )


def _register(manager: KVManager, bootstrap_url: str | None) -> None:
    url = urlsplit(bootstrap_url or "")
    if url.hostname is None or url.port is None:
        raise ConfigError(f"a prefill worker needs the address of its bootstrap server, got {bootstrap_url!r}")
    register_rank(url.hostname, url.port, manager.prefill_info(), timeout=REGISTER_TIMEOUT)
