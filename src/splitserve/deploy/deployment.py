"""Deployment on this machine: the options of a command, and the cluster config derived from them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.machine import MAX_THREADS
from splitserve.core.parallel import WorkerShape
from splitserve.deploy.commands import option_value
from splitserve.deploy.config import ClusterConfig, KeysConfig, PoolConfig, PoolsConfig, RouterConfig, SupervisionConfig
from splitserve.transfer.transports import has_gpu, moves_pools_on

logger = logging.getLogger(__name__)

ONE_RANK = WorkerShape()
# Options that only decode workers of a pair accept.
_DECODE_OPTIONS = ("--transfer-dtype",)
# Options of a worker's shape, and their fields in WorkerShape.
_SHAPE_OPTIONS = {"--tp-size": "tp_size", "--pp-size": "pp_size", "--dp-size": "dp_size"}
# Remedy for numbers of workers that cannot serve.
_COUNT_REMEDY = "give --prefill and --decode 1 or more, or --prefill 0 --decode 0 --null N for N colocated workers"
# Options of the router with key files, and their fields in a cluster config.
_KEY_OPTIONS = {"--api-key-file": "clients", "--operator-key-file": "operators", "--worker-key-file": "workers"}


class LocalDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """A router and its workers on this machine. Raises ConfigError if they cannot serve together."""

    model: str = "smollm2"
    # Number of prefill, decode and colocated workers.
    prefill: int = 1
    decode: int = 1
    null: int = 0
    # Shape of each prefill and each decode worker.
    prefill_shape: WorkerShape = ONE_RANK
    decode_shape: WorkerShape = ONE_RANK
    dtype: str = "auto"
    # Transfer backend.
    backend: str = "tcp"
    # Whether prefill and decode workers share one pool, so that pages change owner instead of being copied.
    hand_over: bool = False
    # Address of the router. Port 0: any free one.
    host: str = "127.0.0.1"
    port: int = 0
    # CPU threads per rank. None: the cores, divided by the number of ranks.
    threads: int | None = None
    # Options of `splitserve serve`: for all workers, and only for prefill and decode workers.
    worker_args: Sequence[str] = ()
    pair_args: Sequence[str] = ()
    # Options of `splitserve router`. Key files become keys of the whole cluster.
    router_args: Sequence[str] = ()
    # Cluster token of a cluster that other workers join. None: a generated one.
    cluster_token_file: Path | None = None
    log_level: str = "info"
    log_format: str = "text"
    supervision: SupervisionConfig = SupervisionConfig(max_failed_starts=3)

    def __post_init__(self) -> None:
        if (self.prefill > 0) != (self.decode > 0):
            raise ConfigError(
                f"{self.prefill} prefill and {self.decode} decode workers: each kind needs the other; {_COUNT_REMEDY}"
            )
        if min(self.prefill, self.decode, self.null) < 0 or not (self.prefill or self.null):
            raise ConfigError(f"a cluster needs at least one worker: {_COUNT_REMEDY}")
        shapes = (self.prefill_shape, self.decode_shape)
        if not self.prefill and shapes != (ONE_RANK, ONE_RANK):
            raise ConfigError(
                "--prefill-*-size and --decode-*-size are for pairs, and there are none: give colocated workers "
                f"their shape after --: {self.model} -- --tp-size N"
            )
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise OptionError("--threads", f"{self.threads}: it must be in [1, {MAX_THREADS}]")
        if self.hand_over and self.backend != "shm":
            raise OptionError(
                "--hand-over",
                f"needs --transfer-backend shm, not {self.backend}: no other backend has a KV pool that workers share; "
                "add --transfer-backend shm, or leave --hand-over out",
            )
        if self.hand_over and any(shape.tp_size * shape.pp_size > 1 for shape in shapes):
            raise OptionError(
                "--hand-over", "is between workers of one rank each: leave it out, or --*-tp-size and --*-pp-size"
            )

    def config(self, shared_pool: Path | None = None) -> ClusterConfig:
        """Return the config of the cluster. It also contains pools without workers, so that they can be scaled up.

        `shared_pool`: file of the pool of prefill and decode workers. None: each has its own.
        """
        keys, router_args = _split_keys(self.router_args)
        decode_args, worker_args = _partition(self.worker_args, _DECODE_OPTIONS if self.decode else ())
        # Pairs have options of their own for this.
        shape_args, worker_args = _partition(worker_args, () if self.prefill else _SHAPE_OPTIONS)
        pair_args = [*self.pair_args, *(() if shared_pool is None else ("--shared-pool", str(shared_pool)))]
        return ClusterConfig(
            name=f"up-{self.port or os.getpid()}",
            model=self.model,
            cluster_token_file=None if self.cluster_token_file is None else str(self.cluster_token_file),
            pools=PoolsConfig(
                prefill=self._pool(self.prefill, self.prefill_shape, pair_args),
                decode=self._pool(self.decode, self.decode_shape, [*pair_args, *decode_args]),
                colocated=self._pool(self.null, _shape_of(shape_args), ()),
            ),
            worker_args=self._worker_args(worker_args),
            router=RouterConfig(host=self.host, port=self.port, args=tuple(router_args)),
            keys=keys,
            supervision=self.supervision,
            log_level=self.log_level,
            log_format=self.log_format,
        )

    @contextmanager
    def shared_pool(self) -> Iterator[Path | None]:
        """Yield the file of the pool that prefill and decode workers share. None: they share no pool."""
        if not self.hand_over:
            yield None
            return
        descriptor = os.memfd_create("splitserve-pool", os.MFD_CLOEXEC)
        try:
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        finally:
            os.close(descriptor)

    def _pool(self, replicas: int, shape: WorkerShape, args: Sequence[str]) -> PoolConfig:
        return PoolConfig(replicas=replicas, cpus=self.threads, args=tuple(args), **dataclasses.asdict(shape))

    def _worker_args(self, options: Sequence[str]) -> tuple[str, ...]:
        args = ["--dtype", self.dtype, "--disaggregation-transfer-backend", self.backend, *options]
        device = option_value(options, "--device")
        if device is None:
            # The user chose no device: choose one from which the backend can transfer KV.
            device = "auto" if not self.prefill or moves_pools_on(self.backend, "cuda") else "cpu"
            args += ["--device", device]
            if device == "cpu" and has_gpu():
                _note_unused_gpu(self.backend)
        num_workers = self.prefill + self.decode + self.null
        if device != "cpu" and num_workers > 1 and option_value(options, "--workers-per-gpu") is None:
            # All workers begin with the machine's first GPU.
            args += ["--workers-per-gpu", str(num_workers)]
        return tuple(args)


@functools.cache
def _note_unused_gpu(backend: str) -> None:
    """Log, once per process, that a backend is the reason for computing on the CPU."""
    logger.warning(
        "the GPU of this machine is not used: the transfer backend %s cannot move KV in its memory; "
        "--transfer-backend cuda_ipc computes on the GPU",
        backend,
    )


def _shape_of(args: Sequence[str]) -> WorkerShape:
    """Return the shape that options of a worker give. Raises OptionError."""
    sizes = {}
    for option, name in _SHAPE_OPTIONS.items():
        if (value := option_value(args, option)) is not None:
            if not value.isdecimal() or int(value) < 1:
                raise OptionError(option, f"{value}: it must be a number of at least 1")
            sizes[name] = int(value)
    return WorkerShape(**sizes)


def _split_keys(router_args: Sequence[str]) -> tuple[KeysConfig, list[str]]:
    """Return the key files in the router's options, and the other options."""
    files = {field: option_value(router_args, option) for option, field in _KEY_OPTIONS.items()}
    return KeysConfig(**files), _partition(router_args, _KEY_OPTIONS)[1]


def _partition(args: Sequence[str], options: Container[str]) -> tuple[list[str], list[str]]:
    """Return the words of these options with their values, and the other words."""
    chosen: list[str] = []
    rest: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name not in options:
            rest.append(word)
            continue
        chosen.append(word)
        if not equals and words:
            chosen.append(words.pop(0))
    return chosen, rest
