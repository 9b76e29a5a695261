"""Configuration of the router: its options, for the command line, tests and embedding programs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from splitserve.core.config import LOG_FORMATS, LOG_LEVELS
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.limits import LimitsConfig
from splitserve.core.options import Config, check_ranges, option, section
from splitserve.core.request import DisaggregationMode
from splitserve.process.lifecycle import ready_path
from splitserve.router.policies import POLICIES

# Origin as browsers send it: no path, no capitals.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/A-Z\s]+")
# A URL without its scheme.
_ADDRESS = re.compile(r"[\w.-]+:\d+/?")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Prefill worker given at startup."""

    url: str
    # Port of its bootstrap server. None: the workers' own option applies.
    bootstrap_port: int | None = None

    @classmethod
    def parse(cls, text: str) -> PrefillConfig:
        """Read `URL`, `URL PORT` or `URL none`. Raises ConfigError."""
        match text.split():
            case [url]:
                return cls(parse_url(url))
            case [url, port] if port.lower() == "none":
                return cls(parse_url(url))
            case [url, port] if port.isdecimal() and 0 < int(port) < 65536:
                return cls(parse_url(url), int(port))
        raise OptionError("--prefill", f"{text!r}: give a URL and then a bootstrap port, 'none' or nothing")


def parse_urls(words: Sequence[str], option: str) -> tuple[str, ...]:
    return tuple(parse_url(word) for word in words)


class LBArgs(Config, frozen=True, kw_only=True):
    """Configuration of one router."""

    prefill: tuple[PrefillConfig, ...] = option(
        (),
        "A prefill worker; repeatable.",
        kind=list[str] | None,
        parse=lambda words, _: tuple(PrefillConfig.parse(text) for text in words),
        metavar="URL [BOOTSTRAP_PORT]",
        section="Workers",
    )
    decode: tuple[str, ...] = option(
        (), "A decode worker; repeatable.", kind=list[str] | None, parse=parse_urls, metavar="URL"
    )
    # Used if there is no prefill and decode pair.
    workers: tuple[str, ...] = option(
        (),
        "A colocated worker; repeatable.",
        name="worker",
        kind=list[str] | None,
        parse=parse_urls,
        metavar="URL",
        aliases="--worker-urls",
    )
    # Read by `register.py`.
    workers_file: Path | None = option(
        None, "Workers, one JSON object per line; read again when it changes.", metavar="FILE"
    )
    # Used by `health.py`.
    probe: bool = option(True, "Send requests to a worker that joins only after a probe through it.")
    policy: str = option(
        "round_robin", "Policy that chooses the worker of a request.", choices=POLICIES, section="Routing"
    )
    prefill_policy: str | None = option(None, "Policy for prefill workers. Default: --policy.", choices=POLICIES)
    decode_policy: str | None = option(None, "Policy for decode workers. Default: --policy.", choices=POLICIES)
    balance_abs_threshold: int = option(
        8,
        "cache_aware: skip a worker with more than this many requests above the least loaded one, if it also exceeds "
        "--balance-rel-threshold.",
        ge=0,
    )
    balance_rel_threshold: float = option(
        1.5,
        "cache_aware: skip a worker with more than this many times the requests of the least loaded one, if it also "
        "exceeds --balance-abs-threshold.",
        ge=1,
    )
    # None: the workers' model, if its folder exists on this machine.
    model: str | None = option(
        None,
        "cache_aware: model with the tokenizer for prompts. Default: the workers' model.",
        metavar="MODEL",
        aliases="--model-path --tokenizer-path",
    )
    # At least one, because a decode worker computes one token at least. None: never.
    disaggregate_above: int | None = option(
        None,
        "Send a request to a decode worker alone if at most N tokens of its prompt are not cached there.",
        ge=1,
        metavar="N",
    )
    timeout: float = option(
        1800.0, "Seconds per request in total.", aliases="--request-timeout-secs", section="Times and retries"
    )
    connect_timeout: float = option(5.0, "Seconds to connect to a worker.")
    # An answer that is not streamed is silent until it is complete. Health checks find a worker that hangs.
    idle_timeout: float = option(600.0, "Seconds without a byte of a stream after which its worker counts as lost.")
    health_interval: float = option(
        2.0, "Seconds between two health checks of a worker.", aliases="--health-check-interval-secs"
    )
    # It applies to workers that send heartbeats.
    hang_timeout: float = option(
        30.0, "Seconds without an answer to health checks after which a worker counts as hung."
    )
    max_retries: int = option(
        3,
        "Retries of a request on other workers. Each new token starts the count again.",
        ge=0,
        aliases="--retry-max-retries",
    )
    max_prefill_retries: int = option(
        1,
        "Retries within --max-retries after a worker hung or died while it tokenized or prefilled the request. "
        "Raise it only if workers die for other reasons: a request that kills workers kills one more per retry.",
        ge=0,
    )
    worker_wait_timeout: float = option(
        30.0,
        "Seconds that a request waits before each attempt if a role has no worker, until one returns. Set it above the "
        "time of a restart. 0: none waits.",
        ge=0,
    )
    drain_timeout: float = option(30.0, "Seconds that running requests may take to finish on shutdown.", ge=0)
    max_running_requests: int | None = option(
        None,
        "Requests that workers process at the same time. Default: no limit.",
        ge=1,
        aliases="--max-concurrent-requests",
        section="Admission",
    )
    max_queued_requests: int = option(
        1024,
        "Requests that wait for admission, and for a worker. Beyond that: 503.",
        ge=0,
        aliases="--queue-size",
    )
    # None: no limit.
    rate_limit: float | None = option(
        None,
        "Requests per second and API key. Beyond that: 429.",
        metavar="N",
        aliases="--rate-limit-tokens-per-second",
    )
    rate_limit_burst: int | None = option(
        None,
        "Requests that an API key may send at once. Default: the --rate-limit of one second.",
        ge=1,
        metavar="N",
    )
    trace_records: int = option(
        10_000,
        "Finished requests with a stored trace (GET /v1/trace/ID). 0: store none.",
        ge=0,
        metavar="N",
        section="Tracing",
    )
    trace_sample: float = option(
        1.0,
        "Share of requests with a stored trace. Failed requests and the slowest 1 % are stored in any case.",
        ge=0,
        le=1,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector that gets the spans of stored requests, such as http://HOST:4317. "
        "Needs splitserve[otel].",
        metavar="URL",
    )
    otlp_protocol: str = option("grpc", "Protocol of --otlp-traces-endpoint.", choices=("grpc", "http"))
    # None for one or both: see `api_keys.py`.
    api_key_file: Path | None = option(
        None,
        "File with the keys of clients. Each line: a key, then a name. Clients must present one.",
        metavar="FILE",
        section="Keys and TLS",
    )
    operator_key_file: Path | None = option(
        None, "File with the keys of operators, needed to add, drain, remove and register workers.", metavar="FILE"
    )
    # None: workers require no key.
    worker_key_file: Path | None = option(
        None, "File with the key for workers that have --api-key-file. The first key is sent.", metavar="FILE"
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "Web pages of this origin may send requests; *: any. Repeatable.",
        name="cors_origin",
        kind=list[str] | None,
        parse=lambda words, _: tuple(words),
        metavar="ORIGIN",
        aliases="--cors-allowed-origins",
    )
    ssl_certfile: Path | None = option(None, "PEM certificate: serve https.", metavar="FILE", aliases="--tls-cert-path")
    ssl_keyfile: Path | None = option(None, "PEM key of the certificate.", metavar="FILE", aliases="--tls-key-path")
    worker_ssl_ca_certs: Path | None = option(
        None, "PEM authority of the certificates of workers at https URLs.", metavar="FILE"
    )
    worker_ssl_certfile: Path | None = option(
        None, "PEM certificate for workers that require one (their --ssl-ca-certs).", metavar="FILE"
    )
    worker_ssl_keyfile: Path | None = option(None, "PEM key of --worker-ssl-certfile.", metavar="FILE")
    metrics_include_workers: bool = option(
        False,
        "Add the metrics of all workers to /metrics, with a label worker. "
        "If there are many workers, scrape each one instead.",
        section="Metrics",
    )
    # `max_request_bytes` None: the largest limit among its workers.
    limits: LimitsConfig = section("Limits", LimitsConfig())
    host: str = option("127.0.0.1", "Address to listen on.", section="Process")
    port: int = option(8000, "Port to listen on. 0: any free one.", ge=0, le=65535)
    ui: bool = option(True, "Do not serve the web page at /.", name="no_ui", negates=True)
    log_level: str = option("info", "Lowest level of log lines.", choices=LOG_LEVELS, aliases="--uvicorn-log-level")
    log_format: str = option(
        "text", "Format of log lines: text, or one JSON object per line for log collectors.", choices=LOG_FORMATS
    )
    access_log: bool = option(
        True,
        "Do not log a line per request.",
        name="disable_access_log",
        negates=True,
        aliases="--disable-log-requests",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise OptionError("--cors-origin", f"{origin!r}: write SCHEME://HOST or SCHEME://HOST:PORT, or *")
        if self.rate_limit is not None and self.api_key_file is None:
            raise OptionError("--rate-limit", "holds for each key: give --api-key-file, too")
        if self.rate_limit_burst is not None and self.rate_limit is None:
            raise OptionError("--rate-limit-burst", "needs --rate-limit")

    @property
    def burst(self) -> int:
        return self.rate_limit_burst or math.ceil(self.rate_limit or 1)

    @property
    def has_keys(self) -> bool:
        return self.api_key_file is not None or self.operator_key_file is not None

    def policy_of(self, mode: DisaggregationMode) -> str:
        own = {DisaggregationMode.PREFILL: self.prefill_policy, DisaggregationMode.DECODE: self.decode_policy}
        return own.get(mode) or self.policy


class RouterProcessConfig(Config, frozen=True, kw_only=True):
    """Options of `splitserve router` for the life of its process."""

    ready_file: Path | None = option(
        None,
        "Write a JSON file with URL and process id when ready.",
        parse=ready_path,
        metavar="FILE",
        section="Process",
    )
    exit_with_parent: bool = option(False, "End when standard input ends.")
    fd: int | None = option(None, "Inherited listening socket.", ge=0, is_hidden=True)


def parse_url(text: str) -> str:
    """Return `http://host:port` without a trailing slash. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(text.strip())
        # As a connection does. Raises a ValueError if a label of the name is empty or longer than 63 characters.
        (parts.hostname or "").encode("idna")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        meant = text.strip() if _ADDRESS.fullmatch(text.strip()) else "HOST:PORT"
        raise ConfigError(f"{text!r} is not the URL of a worker or router: write http://{meant}")
    return text.strip().rstrip("/")
