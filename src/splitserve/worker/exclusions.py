"""The combinations of options that a worker rejects at startup: one table for the error texts and for the docs.

Here are those that follow from the options alone. Others need the model's files, the machine or the loaded model, and
are checked there (`docs/reference/exclusions.md` lists all). To allow a combination, delete its row. `settings_in_role`
rejects a role that a worker cannot change to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.groups import group_of
from splitserve.core.parallel import misfit
from splitserve.core.request import FAKE_BACKEND, DisaggregationMode
from splitserve.core.speculative import SpeculativeConfig
from splitserve.process.cluster_token import settle_host


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A combination of options that is rejected. The error begins with `option` and `rule`."""

    option: str
    rule: str
    reason: str
    is_given: Callable[[WorkerConfig], bool]
    remedy: str = "leave it out"
    # The values of this worker, for the error alone. None: the error has no values.
    figures: Callable[[WorkerConfig], str | None] = lambda config: None

    def error(self, config: WorkerConfig) -> OptionError:
        figures = self.figures(config)
        given = "" if figures is None else f" ({figures})"
        return OptionError(self.option, f"{self.rule}: {self.reason}{given}; {self.remedy}")


def given_exclusions(config: WorkerConfig) -> Iterator[Exclusion]:
    """Yield the rejected combinations in the options of a worker."""
    return (exclusion for exclusion in EXCLUSIONS if exclusion.is_given(config))


def _is_sharded(config: WorkerConfig) -> bool:
    return group_of(config).group_size > 1


def _has_own_checkpoint(config: WorkerConfig) -> bool:
    algorithm = config.speculative.algorithm
    return algorithm is not None and algorithm.has_own_checkpoint


def _is_alone(config: WorkerConfig) -> bool:
    return config.disaggregation.transfer_backend == FAKE_BACKEND


def _misfit(config: WorkerConfig) -> str | None:
    parallel = config.parallel
    return misfit(parallel.tp_size, parallel.pp_size, parallel.nnodes) if parallel.nnodes > 1 else None


# Options of workers that cannot release memory or replace weights, and why.
_MEMORY_OBSTACLES: tuple[tuple[str, str, Callable[[WorkerConfig], bool]], ...] = (
    (
        "--shared-pool",
        "other workers compute in the same pool, and their pages change owner with it",
        lambda c: c.cache.shared_pool is not None,
    ),
    (
        "--nnodes above 1",
        "ranks connect between hosts once, at startup, and a change opens these connections anew",
        lambda c: c.parallel.nnodes > 1,
    ),
)


def memory_obstacle(config: WorkerConfig) -> str | None:
    """Return why this worker cannot release memory or replace its weights. None: it can."""
    found = next(((option, why) for option, why, is_given in _MEMORY_OBSTACLES if is_given(config)), None)
    remedy = "start the worker without it, or restart it with other weights"
    return None if found is None else f"is not possible with {found[0]}: {found[1]}; {remedy}"


def _memory_row(option: str, why: str, is_given: Callable[[WorkerConfig], bool]) -> Exclusion:
    """Return the row of an option that excludes releasable memory."""
    return Exclusion(
        "--enable-memory-saver",
        f"does not go together with {option}",
        why,
        lambda config: config.cache.enable_memory_saver and is_given(config),
    )


def _quantized_with(option: str, choices: tuple[str, ...], value: Callable[[WorkerConfig], str]) -> Exclusion:
    """Return the row of an option that quantized weights restrict."""
    return Exclusion(
        option,
        "does not go together with --quantization",
        "only our kernels compute quantized weights, on CPUs in bfloat16",
        lambda config: config.model.quantization is not None and value(config) not in choices,
        f"give {' or '.join(choices)}",
        value,
    )


def _needs_algorithm(name: str) -> Exclusion:
    """Return the row of a setting of speculation. An option with its default is accepted as if it was not given."""
    default = getattr(SpeculativeConfig(), name)
    return Exclusion(
        f"--speculative-{name.replace('_', '-')}",
        "needs --speculative-algorithm",
        "without an algorithm no tokens are proposed",
        lambda c: c.speculative.algorithm is None and getattr(c.speculative, name) != default,
        "give both, or none",
    )


def _registers_gpu_memory(config: WorkerConfig) -> bool:
    return config.model.device != "cpu" and config.disaggregation.transfer_backend in ("cuda_ipc", "nixl")


_WITH_RANKS = "does not go together with --tp-size or --pp-size above 1"
_WITH_DP_ATTENTION = "does not go together with --enable-dp-attention"

EXCLUSIONS = (
    # Roles and transports.
    Exclusion(
        "--speculative-draft-model",
        "needs --speculative-algorithm draft or eagle3",
        "no other algorithm uses a checkpoint of its own",
        lambda c: c.speculative.draft_model is not None and not _has_own_checkpoint(c),
        "give both, or none",
    ),
    Exclusion(
        "--speculative-algorithm",
        "draft or eagle3 needs --speculative-draft-model",
        "that model or head proposes the tokens",
        lambda c: _has_own_checkpoint(c) and c.speculative.draft_model is None,
        "give both, or none",
    ),
    *(_needs_algorithm(name) for name in ("num_draft_tokens", "num_steps", "ngram_max_match")),
    Exclusion(
        "--transfer-dtype",
        "needs --disaggregation-mode decode",
        "decode workers determine how the KV cache reaches them",
        lambda c: c.disaggregation.mode != "decode" and c.disaggregation.transfer_dtype != "auto",
        "give it to decode workers only",
    ),
    Exclusion(
        "--shared-pool",
        "needs --disaggregation-mode prefill or decode, and --transfer-backend shm",
        "its pages change owner between two workers that map the same memory",
        lambda c: (
            c.cache.shared_pool is not None
            and (c.disaggregation.transfer_backend != "shm" or c.disaggregation.mode == "null")
        ),
        "add --transfer-backend shm and a mode, or leave --shared-pool out",
        lambda c: (
            f"--disaggregation-mode {c.disaggregation.mode}, --transfer-backend {c.disaggregation.transfer_backend}"
        ),
    ),
    Exclusion(
        "--disaggregation-transfer-backend",
        "fake needs --disaggregation-mode prefill or decode",
        "it replaces the other worker of a pair",
        lambda c: _is_alone(c) and c.disaggregation.mode == "null",
        "give a mode, or another backend",
    ),
    Exclusion(
        "--router",
        "does not go together with --transfer-backend fake",
        "answers of such a worker mean nothing, so no router may send requests to it",
        lambda c: _is_alone(c) and bool(c.server.router_urls),
    ),
    # Ranks of one scheduler.
    Exclusion(
        "--pp-layers",
        "needs a number for each stage of --pp-size",
        "it sets the number of layers of each stage",
        lambda c: len(c.parallel.pp_layers) not in (0, c.parallel.pp_size),
        "give as many numbers as stages",
        lambda c: f"{len(c.parallel.pp_layers)} numbers, --pp-size {c.parallel.pp_size}",
    ),
    Exclusion(
        "--enable-expert-parallel",
        "needs --tp-size 2 or more",
        "it distributes experts over tensor parallel ranks",
        lambda c: c.model.expert_parallel and c.parallel.tp_size == 1,
        "give both, or none",
    ),
    Exclusion(
        "--shared-pool",
        _WITH_RANKS,
        "pages change owner only between workers of one rank",
        lambda c: _is_sharded(c) and c.cache.shared_pool is not None,
    ),
    Exclusion(
        "--quantization",
        _WITH_RANKS,
        "only our kernels compute quantized weights, and they are for a model on one rank",
        lambda c: _is_sharded(c) and c.model.quantization is not None,
    ),
    Exclusion(
        "--prefix-host-memory",
        _WITH_RANKS,
        "the ranks must agree on each copy, and an eviction must not wait for that",
        lambda c: _is_sharded(c) and c.cache.prefix_host_memory > 0,
    ),
    # Data parallel attention.
    Exclusion(
        "--enable-dp-attention",
        "needs --dp-size 2 or more",
        "it distributes experts over data parallel ranks",
        lambda c: c.model.dp_attention and c.dp_size == 1,
        "give both, or none",
    ),
    Exclusion(
        "--tp-size",
        "must be a multiple of --dp-size with --enable-dp-attention",
        "it counts the ranks of all schedulers, which share them evenly",
        lambda c: c.model.dp_attention and c.parallel.tp_size > 1 and c.parallel.tp_size % c.dp_size > 0,
        "give a multiple, or leave it out for one rank each",
        lambda c: f"{c.parallel.tp_size}, --dp-size {c.dp_size}",
    ),
    Exclusion(
        "--pp-size",
        _WITH_DP_ATTENTION,
        "all ranks compute one step together, and stages would compute several",
        lambda c: c.model.dp_attention and c.parallel.pp_size > 1,
        "use --tp-size",
    ),
    Exclusion(
        "--shared-pool",
        _WITH_DP_ATTENTION,
        "pages change owner only between workers of one rank",
        lambda c: c.model.dp_attention and c.cache.shared_pool is not None,
    ),
    Exclusion(
        "--quantization",
        _WITH_DP_ATTENTION,
        "only our kernels compute quantized weights, and they need all experts of a layer",
        lambda c: c.model.dp_attention and c.model.quantization is not None,
    ),
    # Several hosts.
    Exclusion(
        "--nnodes",
        _WITH_DP_ATTENTION,
        "ranks that share experts are on one host",
        lambda c: c.model.dp_attention and c.parallel.nnodes > 1,
    ),
    Exclusion(
        "--nnodes",
        "must divide the ranks of --tp-size and --pp-size evenly",
        "a node has whole pipeline stages, or an even part of one",
        lambda c: _misfit(c) is not None,
        "give a number that fits",
        _misfit,
    ),
    # Quantized weights.
    _quantized_with("--dtype", ("auto", "bfloat16"), lambda c: c.model.dtype),
    _quantized_with("--kernels", ("auto",), lambda c: c.model.kernels),
    _quantized_with("--device", ("auto", "cpu"), lambda c: c.model.device),
    # Releasable memory.
    *(_memory_row(*obstacle) for obstacle in _MEMORY_OBSTACLES),
    Exclusion(
        "--enable-memory-saver",
        "does not go together with the backends cuda_ipc and nixl on GPUs",
        "CUDA cannot share or register the memory that torch_memory_saver allocates",
        lambda c: c.cache.enable_memory_saver and _registers_gpu_memory(c),
        "use mooncake or nccl, or --device cpu",
    ),
    # Last, because a combination above cannot work with it either.
    Exclusion(
        "--cluster-token-file",
        "is needed with --nnodes above 1",
        "the nodes of a worker authenticate each other",
        lambda c: c.parallel.nnodes > 1 and not c.disaggregation.cluster_token.secret,
        "give the same file to all nodes (openssl rand -hex 32 > F)",
    ),
)


def settings_in_role(config: WorkerConfig, mode: DisaggregationMode) -> DisaggregationConfig:
    """Return the KV transfer settings of this worker in that role. Raises ConfigError if it cannot have the role."""
    current = config.disaggregation
    if mode is not current.mode and group_of(config).group_size > 1:
        raise ConfigError(
            f"a worker with a model sharded over ranks (--tp-size {config.parallel.tp_size} --pp-size "
            f"{config.parallel.pp_size}) stays what it is: start another worker in the role {mode}"
        )
    if mode is not current.mode and config.model.dp_attention:
        raise ConfigError(
            "a worker with data parallel attention (--enable-dp-attention) cannot change its role: start "
            f"another worker in the role {mode}"
        )
    if mode is DisaggregationMode.NULL and current.transfer_backend == FAKE_BACKEND:
        raise ConfigError(
            f"a worker with --transfer-backend {FAKE_BACKEND} can be prefill or decode, not null: start another worker"
        )
    if mode is DisaggregationMode.NULL and config.cache.shared_pool is not None:
        raise ConfigError(
            "a worker in a shared pool (--shared-pool) hands its pages over: it can be prefill or decode, not null"
        )
    return settle_host(msgspec.structs.replace(current, mode=mode))
