"""Options of the router process, the same for the command line, tests and embedding programs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from splitserve.core.config import LimitsConfig
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
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
        raise ConfigError(f"--prefill {text!r}: give a URL and then a bootstrap port, 'none' or nothing")


@dataclass(frozen=True, slots=True)
class LBArgs:
    """Configuration of one router."""

    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = 8000
    # Routing policy, and those of prefill and decode workers. None: `policy`.
    policy: str = "round_robin"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    # Policy cache_aware: a worker is avoided, whatever it has cached, while its load exceeds the least load by more
    # than this number of requests and by more than this factor.
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5
    # Folder or name of the model with the tokenizer for prompts, as for a worker. None: that of the workers, if their
    # folder exists on this machine.
    model: str | None = None
    # A decode worker serves a request alone if it has to compute at most this many prompt tokens. None: never.
    disaggregate_above: int | None = None
    prefill: tuple[PrefillConfig, ...] = ()
    decode: tuple[str, ...] = ()
    # Colocated workers: used if there is no prefill and decode pair.
    workers: tuple[str, ...] = ()
    # File of JSON lines that list workers, see `workers_file.py`. None: no file.
    workers_file: Path | None = None
    # Whether a worker that joins must prove its path before it gets requests, see `prober.py`.
    probe: bool = True
    # Deadlines in seconds: of a whole request, of a connection attempt, and of the silence while a worker answers.
    timeout: float = 1800.0
    connect_timeout: float = 5.0
    idle_timeout: float = 600.0
    # Seconds between two health checks of a worker.
    health_interval: float = 2.0
    # Seconds without a heartbeat after which a worker that should send them counts as hung.
    hang_timeout: float = 30.0
    # Number of further workers to which a request is sent after failures, one after the other. A stream restarts the
    # count after each token.
    max_retries: int = 3
    # Retries of a request after its worker hung or died while it tokenized or prefilled that request.
    max_prefill_retries: int = 1
    # Maximum number of requests that run at the workers (None: no limit), and that wait in the router.
    max_running_requests: int | None = None
    max_queued_requests: int = 1024
    # Requests per key: per second on average (None: no limit), and in a burst (None: as many as in one second).
    rate_limit: float | None = None
    rate_limit_burst: int | None = None
    # At shutdown, seconds that running requests get to finish.
    drain_timeout: float = 30.0
    log_level: str = "info"
    # One log line per request.
    access_log: bool = True
    # Files with the keys of clients, and of operators and workers. None: see `api_keys.py`.
    api_key_file: Path | None = None
    operator_key_file: Path | None = None
    # File with keys. The first authenticates the router's requests to workers. None: workers require no key.
    worker_key_file: Path | None = None
    # Origins of web pages that may send requests, e.g. https://chat.example.org; "*": any.
    cors_origins: tuple[str, ...] = ()
    # PEM files; None: no TLS.
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    # PEM files for workers at https URLs: the authority of their certificates, and the router's own certificate and
    # key.
    worker_ssl_ca_certs: Path | None = None
    worker_ssl_certfile: Path | None = None
    worker_ssl_keyfile: Path | None = None
    # `max_request_bytes` None: the largest limit among its workers.
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def __post_init__(self) -> None:
        for name in ("policy", "prefill_policy", "decode_policy"):
            if (value := getattr(self, name)) is not None and value not in POLICIES:
                raise ConfigError(f"--{name.replace('_', '-')} {value!r}: choose one of {', '.join(POLICIES)}")
        for name in ("max_retries", "max_prefill_retries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more")
        if self.max_running_requests is not None and self.max_running_requests < 1:
            raise ConfigError("--max-running-requests must be at least 1")
        if self.max_queued_requests < 0:
            raise ConfigError("--max-queued-requests must be 0 or more")
        if self.disaggregate_above is not None and self.disaggregate_above < 1:
            raise ConfigError("--disaggregate-above must be at least 1: a decode worker computes one token at least")
        self._check_rate()
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--cors-origin {origin!r}: write SCHEME://HOST or SCHEME://HOST:PORT, or *")
        if self.balance_abs_threshold < 0 or self.balance_rel_threshold < 1:
            raise ConfigError("--balance-abs-threshold must be 0 or more, --balance-rel-threshold 1 or more")
        for name in ("timeout", "connect_timeout", "idle_timeout", "health_interval", "hang_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0 seconds")

    def _check_rate(self) -> None:
        if self.rate_limit is not None and not 0 < self.rate_limit < math.inf:
            raise ConfigError("--rate-limit must be above 0 requests a second")
        if self.rate_limit is not None and self.api_key_file is None:
            raise ConfigError("--rate-limit holds for each key: give --api-key-file, too")
        if self.rate_limit_burst is not None and (self.rate_limit is None or self.rate_limit_burst < 1):
            raise ConfigError("--rate-limit-burst must be at least 1, and needs --rate-limit")

    @property
    def burst(self) -> int:
        return self.rate_limit_burst or math.ceil(self.rate_limit or 1)

    @property
    def has_keys(self) -> bool:
        return self.api_key_file is not None or self.operator_key_file is not None

    def policy_of(self, mode: DisaggregationMode) -> str:
        own = {DisaggregationMode.PREFILL: self.prefill_policy, DisaggregationMode.DECODE: self.decode_policy}
        return own.get(mode) or self.policy


def parse_url(text: str) -> str:
    """Return `http://host:port` without a trailing slash. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(text.strip())
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        meant = text.strip() if _ADDRESS.fullmatch(text.strip()) else "HOST:PORT"
        raise ConfigError(f"{text!r} is not the URL of a worker or router: write http://{meant}")
    return text.strip().rstrip("/")
