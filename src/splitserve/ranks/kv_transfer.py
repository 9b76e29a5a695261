"""Assembly of the KV transfer of a worker: transport, control channel, directory, manager and its thread, in each rank.

The driver's manager orders the transitions of a room on all ranks. The followers' FollowerRooms execute them, in a
thread beside the one that computes.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from splitserve.core.clock import SystemClock
from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import ConfigError, OptionError, RanksLostError, SplitserveError
from splitserve.core.machine import Sharing
from splitserve.core.options import size_text
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import FAKE_BACKEND, DisaggregationMode
from splitserve.engine.build import BuiltEngine
from splitserve.process.threads import Waker
from splitserve.ranks.group import RankPlace
from splitserve.ranks.kv_follower import FollowerRooms
from splitserve.ranks.rank_channel import FollowerChannel, LinkThread
from splitserve.transfer.control import ManagerThread, ZmqChannel
from splitserve.transfer.convert import StagingArea
from splitserve.transfer.decode_manager import DecodeManager
from splitserve.transfer.directory import HttpDirectory, register_rank
from splitserve.transfer.group_wire import RankLink
from splitserve.transfer.mail import Mailbox
from splitserve.transfer.manager import TransferKit
from splitserve.transfer.metadata import MetadataBuffers, ReqToMetadataIdxAllocator, RowWidths
from splitserve.transfer.pool_bytes import Arrivals, Checksums
from splitserve.transfer.prefill_manager import PrefillManager
from splitserve.transfer.room import Context, RankGroup
from splitserve.transfer.synthetic import SyntheticKV
from splitserve.transfer.transports import create_transport, moves_pools_on, sharing_of
from splitserve.transfer.transports.base import TransportOptions
from splitserve.transfer.wire import KVArgs

logger = logging.getLogger(__name__)

# Seconds for which a prefill rank tries to reach the bootstrap server of its own worker.
REGISTER_TIMEOUT = 30.0
# Limit of descriptors of a rank, if the system allows it. It is high because the control port does not bound its
# pending connections, which may each last a second.
MAX_DESCRIPTORS = 1 << 16


def open_transfer(
    config: DisaggregationConfig,
    widths: RowWidths,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    place: RankPlace,
    on_change: Callable[[], None],
    closing: ExitStack,
) -> TransferKit[Any]:
    """Open the KV transfer of a prefill or decode worker, also on its followers.

    `closing` ends it: first the threads, then the transport, last those of the followers.
    `on_change` is called from one of these threads when a room's state changed.
    """
    channel = place.channel
    if channel is None:
        return _open_rank(config, widths, engine, bootstrap_url, place, on_change, closing)
    closing.callback(channel.close_transfer)
    try:
        place = replace(place, instance=channel.open_transfer(bootstrap_url))
        kit = _open_rank(config, widths, engine, bootstrap_url, place, on_change, closing, channel.links)
    except SplitserveError as error:
        # Followers may wait for this rank.
        raise RanksLostError(f"The ranks of this worker did not all open their KV transfer: {error.message}") from error

    def tick() -> None:
        if kit.manager.collect_reports():
            on_change()

    thread = LinkThread(channel.links, tick, place.end)
    closing.callback(thread.close)
    thread.start()
    return kit


def follow_rooms(
    config: WorkerConfig,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    place: RankPlace,
    channel: FollowerChannel,
    closing: ExitStack,
) -> None:
    """Execute the driver's orders for this follower's rooms, until `closing` ends it."""
    thread = LinkThread([channel.link], lambda: rooms.tick(), place.end)
    widths = row_widths(config, engine)
    own = _open_rank(config.disaggregation, widths, engine, bootstrap_url, place, thread.wake, closing)
    rooms = FollowerRooms(own.manager, channel.link)
    closing.callback(thread.close)
    thread.start()


def _bootstrap_address(url: str | None) -> tuple[str, int]:
    """Return host and port of the bootstrap server. Raises ConfigError."""
    parts = urlsplit(url or "")
    if parts.hostname is None or parts.port is None:
        raise ConfigError(f"a prefill worker needs the address of its bootstrap server, got {url!r}")
    return parts.hostname, parts.port


def _open_rank(
    config: DisaggregationConfig,
    widths: RowWidths,
    engine: BuiltEngine,
    bootstrap_url: str | None,
    place: RankPlace,
    on_change: Callable[[], None],
    closing: ExitStack,
    links: Sequence[RankLink] = (),
) -> TransferKit[Any]:
    """Open one rank's KV transfer; `closing` ends it. `links`: the driver's to its followers."""
    check_pool_device(config.transfer_backend, engine.pool.device.type)
    raise_descriptor_limit()
    shareable = sharing_of(config.transfer_backend, config.transfer_options) is not Sharing.NONE
    metadata = _metadata(config, widths, shareable)
    waker = Waker()
    closing.callback(waker.close)
    token = config.cluster_token.secret
    options = TransportOptions(
        host=config.host, token=token, on_progress=waker.wake, extra=dict(config.transfer_options)
    )
    transport = create_transport(config.transfer_backend, options)
    closing.callback(transport.close)
    staging, arrivals = _staging(config, engine, shareable), _arrivals(config, engine)
    extra = [staging.region()] if staging else []
    transport.register([*engine.regions, metadata.region(), *extra])
    args = _kv_args(config, engine, metadata, place.rank, can_convert=staging is not None)
    channel = ZmqChannel(config.host, token)
    context = Context(
        clock=SystemClock(),
        mailbox=Mailbox(channel),
        transport=transport,
        args=args,
        config=config,
        metadata=metadata,
        staging=staging,
        arrivals=arrivals,
        synthetic=_synthetic(config, engine),
        checksums=Checksums(engine.layout, engine.regions) if _is_on_cpu(engine) else None,
        shared=engine.shared,
        group_args=_args_of_group(args, place),
        group=RankGroup(place.rank, links) if links else RankGroup(),
        instance=place.instance,
        wake=waker.wake,
        expect=engine.pool.expect,
    )
    manager: PrefillManager | DecodeManager
    if config.mode is DisaggregationMode.DECODE:
        directory = HttpDirectory(waker.wake, token)
        closing.callback(directory.close)
        manager = DecodeManager(context, directory)
    else:
        manager = PrefillManager(context)
    thread = ManagerThread(manager, channel, waker, on_change)
    closing.callback(thread.close)
    thread.start()
    if config.mode is DisaggregationMode.PREFILL:
        host, port = _bootstrap_address(bootstrap_url)
        register_rank(host, port, manager.prefill_info(), token, timeout=REGISTER_TIMEOUT)
    return TransferKit(manager, metadata, ReqToMetadataIdxAllocator(config.num_metadata_slots))


def row_widths(config: WorkerConfig, engine: BuiltEngine) -> RowWidths:
    """Return the widths of this worker's metadata rows, the same on all ranks."""
    return RowWidths(
        top_logprobs=config.server.limits.max_top_logprobs,
        hidden_state=engine.loaded.hidden_size if config.model.return_hidden_states else 0,
        draft_state=engine.draft_state_size,
    )


def _metadata(config: DisaggregationConfig, widths: RowWidths, shareable: bool) -> MetadataBuffers:
    metadata = MetadataBuffers(config.num_metadata_slots, widths, shareable=shareable)
    logger.info(
        "metadata rows allocated rows=%d row_bytes=%d memory=%s top_logprobs=%d hidden_state=%d",
        metadata.size,
        metadata.row_bytes,
        size_text(metadata.region().length),
        widths.top_logprobs,
        widths.hidden_state,
    )
    return metadata


def raise_descriptor_limit() -> None:
    """Raise this process's soft limit of descriptors to the hard one, up to MAX_DESCRIPTORS."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_pool_device(backend: str, device_type: str) -> None:
    """Raise ConfigError if the backend cannot read a KV pool on that device."""
    if moves_pools_on(backend, device_type):
        return
    if device_type == "cpu":
        raise ConfigError(
            f"the transfer backend {backend!r} moves memory of GPUs, and the KV pool is on the CPU: use "
            "--transfer-backend shm or tcp, or --device cuda"
        )
    raise ConfigError(
        f"the transfer backend {backend!r} moves memory of the CPU, and the KV pool is on a GPU: use "
        "--transfer-backend cuda_ipc on one machine, mooncake or nccl between machines, or --device cpu"
    )


def _is_on_cpu(engine: BuiltEngine) -> bool:
    return engine.pool.device.type == "cpu"


def _staging(config: DisaggregationConfig, engine: BuiltEngine, shareable: bool) -> StagingArea | None:
    """Return the area in which prefill packs and converts KV.

    None: the worker is no prefill worker, or the CPU cannot read the pool.
    """
    if config.mode is not DisaggregationMode.PREFILL or not _is_on_cpu(engine):
        return None
    return StagingArea(engine.regions, len(engine.regions) + 1, shareable=shareable)


def _arrivals(config: DisaggregationConfig, engine: BuiltEngine) -> Arrivals | None:
    """Return the conversion of received KV to the pool's dtype. Raises ConfigError if the CPU cannot read the pool."""
    if config.mode is not DisaggregationMode.DECODE or config.transfer_dtype == "auto":
        return None
    if not _is_on_cpu(engine):
        raise OptionError(
            "--transfer-dtype",
            f"{config.transfer_dtype} needs a KV pool on the CPU, and this one is on "
            f"{engine.pool.device}: leave it at auto",
        )
    return Arrivals(engine.layout, engine.regions, config.transfer_dtype)


def _synthetic(config: DisaggregationConfig, engine: BuiltEngine) -> SyntheticKV | None:
    """Return the writer of KV for rooms without a peer. None: only short health checks use such rooms."""
    is_needed = config.transfer_backend == FAKE_BACKEND or _is_on_cpu(engine)
    is_decode = config.mode is DisaggregationMode.DECODE
    return SyntheticKV(engine.layout, engine.regions) if is_decode and is_needed else None


def _args_of_group(own: KVArgs, place: RankPlace) -> list[KVArgs]:
    """Return the arguments of all ranks of this worker, by `ParallelRank.index`."""
    if place.exchange is None:
        return [own]
    return [msgspec.msgpack.decode(args, type=KVArgs) for args in place.exchange(msgspec.msgpack.encode(own))]


def _kv_args(
    config: DisaggregationConfig,
    engine: BuiltEngine,
    metadata: MetadataBuffers,
    rank: ParallelRank,
    *,
    can_convert: bool,
) -> KVArgs:
    return KVArgs(
        backend=config.transfer_backend,
        model=engine.fingerprint,
        draft_model=engine.draft_fingerprint,
        layout=engine.layout,
        metadata_row_bytes=metadata.row_bytes,
        metadata_widths=metadata.widths,
        num_metadata_rows=metadata.size,
        rank=rank,
        can_convert=can_convert,
        wants_checksum=config.transfer_checksum,
        can_checksum=_is_on_cpu(engine),
        shared_pool=engine.shared.identity if engine.shared else "",
        generation=engine.shared.generation if engine.shared else 0,
        transfer_dtype=None if config.transfer_dtype == "auto" else config.transfer_dtype,
    )
