"""Options of the router process, the same for the command line, a test and an embedding program."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

from splitserve.config import LimitsConfig
from splitserve.core.request import DisaggregationMode
from splitserve.errors import ConfigError
from splitserve.router.policies import POLICIES

# As browsers send it: no path, no capitals.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/A-Z\s]+")
# A URL but for its scheme.
_ADDRESS = re.compile(r"[\w.-]+:\d+/?")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """A prefill worker given at the start."""

    url: str
    # Port of its bootstrap server; None: the workers' own option counts.
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
    """Everything one router is told."""

    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = 8000
    # Who gets a request, and the same for one kind of worker; None: `policy`.
    policy: str = "round_robin"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    # Policy cache_aware: a worker is passed over, whatever it has cached, while it has so many requests more than the
    # least loaded, and so many times as many.
    balance_abs_threshold: int = 8
    balance_rel_threshold: float = 1.5
    # Whose tokenizer reads the prompts for it: a folder or a name, as for a worker; None: that of the workers, where
    # their folder is one of this machine.
    model: str | None = None
    # A request goes to a decode worker alone where that has to compute so many tokens of its prompt, or fewer; None:
    # never.
    disaggregate_above: int | None = None
    prefill: tuple[PrefillConfig, ...] = ()
    decode: tuple[str, ...] = ()
    # Colocated workers: used where there is no prefill and decode pair.
    workers: tuple[str, ...] = ()
    # JSON lines that list workers, see `workers_file.py`; None: there is none.
    workers_file: Path | None = None
    # Prove the path of a worker that joins before it gets requests, see `prober.py`.
    probe: bool = True
    # Deadlines in seconds: a whole request, the connection to a worker, silence of a worker while it answers.
    timeout: float = 1800.0
    connect_timeout: float = 5.0
    idle_timeout: float = 600.0
    # Seconds between two questions to a worker how it is.
    health_interval: float = 2.0
    # Seconds without a sign of life after which a worker that is asked for one counts as hung.
    hang_timeout: float = 30.0
    # Other workers that a request may be given to, one after the other, where those it has fail; in a stream anew after
    # each token.
    max_retries: int = 3
    # Retries of a request whose worker hung or died while it tokenized or prefilled that request.
    max_prefill_retries: int = 1
    # Requests at the workers at once, None: as many as come; and beyond them, waiting.
    max_running_requests: int | None = None
    max_queued_requests: int = 1024
    # Requests a second of each key in the long run, and at once; None: any, and as many as come in a second.
    rate_limit: float | None = None
    rate_limit_burst: int | None = None
    # At shutdown, seconds that running requests get to finish.
    drain_timeout: float = 30.0
    log_level: str = "info"
    # One line a request.
    access_log: bool = True
    # Files with the keys of clients, and of operators and workers; None: see `key_guard.py`.
    api_key_file: Path | None = None
    operator_key_file: Path | None = None
    # File whose first key opens the workers; None: they ask for none.
    worker_key_file: Path | None = None
    # Web pages of these origins may ask, e.g. https://chat.example.org; "*": any.
    cors_origins: tuple[str, ...] = ()
    # PEM files; None: no TLS.
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    # PEM files for workers at https URLs: authority of their certificates; certificate and key of the router as client.
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

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of the router to an argparse parser."""
        for name, option, kind in _options():
            default = getattr(cls(), name)
            if name == "prefill":
                parser.add_argument(option, action="append", nargs="+", default=[], metavar=("URL", "BOOTSTRAP_PORT"))
            elif kind is bool:
                parser.add_argument(option, dest=name, action="store_false")
            elif default == ():
                parser.add_argument(option, dest=name, action="append", default=[])
            else:
                choices = POLICIES if name.endswith("policy") else None
                parser.add_argument(option, dest=name, type=kind, default=default, choices=choices)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> LBArgs:
        """Raises ConfigError for a malformed URL or port."""
        given = {name: getattr(args, name) for name, _, _ in _options()}
        given["prefill"] = tuple(PrefillConfig.parse(" ".join(words)) for words in args.prefill)
        for name in ("decode", "workers"):
            given[name] = tuple(parse_url(url) for url in given[name])
        return cls(**{**given, "cors_origins": tuple(args.cors_origins)})


# Options whose names differ from those of their fields.
_OPTION_NAMES = {
    "workers": "--worker",
    "cors_origins": "--cors-origin",
    "probe": "--no-probe",
    "access_log": "--disable-access-log",
}


def _options() -> Iterator[tuple[str, str, Any]]:
    """Yield field, option and type of each option for argparse."""
    for name, hint in get_type_hints(LBArgs).items():
        if name != "limits":
            kind = next((k for k in (*get_args(hint), hint) if k is not NoneType), str)
            yield name, _OPTION_NAMES.get(name, f"--{name.replace('_', '-')}"), kind


def parse_url(text: str) -> str:
    """`http://host:port` without a trailing slash. Raises ConfigError for anything else."""
    try:
        parts = urlsplit(text.strip())
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        meant = text.strip() if _ADDRESS.fullmatch(text.strip()) else "HOST:PORT"
        raise ConfigError(f"{text!r} is not the URL of a worker or router: write http://{meant}")
    return text.strip().rstrip("/")
