"""`splitserve router`: its options, and the LBArgs that follow from their values."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from splitserve.cli.derive import Option, fill, in_sections, limits, takes
from splitserve.process.settings import LEVELS
from splitserve.router.args import LBArgs, PrefillConfig, parse_url
from splitserve.router.policies import POLICIES

_FILE = {"metavar": "FILE"}
_WORKERS = (
    Option(
        "prefill",
        "A prefill worker; repeatable.",
        convert=lambda words: tuple(PrefillConfig.parse(text) for text in words),
        settings={"metavar": "URL [BOOTSTRAP_PORT]"},
    ),
    Option(
        "decode",
        "A decode worker; repeatable.",
        convert=lambda words: tuple(parse_url(url) for url in words),
        settings={"metavar": "URL"},
    ),
    Option(
        "workers",
        "A colocated worker; repeatable.",
        name="worker",
        convert=lambda words: tuple(parse_url(url) for url in words),
        settings={"metavar": "URL"},
    ),
    Option("workers_file", "Workers, one JSON object per line; read again when it changes.", settings=_FILE),
    Option("probe", "Send requests to a worker that joins only after a probe through it."),
)
_ROUTING = (
    Option("policy", "Policy that chooses the worker of a request.", choices=POLICIES),
    Option("prefill_policy", "Policy for prefill workers. Default: --policy.", choices=POLICIES),
    Option("decode_policy", "Policy for decode workers. Default: --policy.", choices=POLICIES),
    Option(
        "balance_abs_threshold",
        "cache_aware: skip a worker with more than this many requests above the least loaded one, "
        "if it also exceeds --balance-rel-threshold.",
    ),
    Option(
        "balance_rel_threshold",
        "cache_aware: skip a worker with more than this many times the requests of the least loaded one, "
        "if it also exceeds --balance-abs-threshold.",
    ),
    Option(
        "model",
        "cache_aware: model with the tokenizer for prompts. Default: the workers' model.",
        settings={"metavar": "MODEL"},
    ),
    Option(
        "disaggregate_above",
        "Send a request to a decode worker alone if at most N tokens of its prompt are not cached there.",
        settings={"metavar": "N"},
    ),
)
_TIMES = (
    Option("timeout", "Seconds per request in total."),
    Option("connect_timeout", "Seconds to connect to a worker."),
    Option("idle_timeout", "Seconds without a byte from a worker after which its answer counts as lost."),
    Option("health_interval", "Seconds between two health checks of a worker."),
    Option("hang_timeout", "Seconds without an answer to health checks after which a worker counts as hung."),
    Option("max_retries", "Retries of a request on other workers. Each new token starts the count again."),
    Option(
        "max_prefill_retries",
        "Retries within --max-retries after a worker hung or died while it tokenized or prefilled the request. "
        "Raise it only if workers die for other reasons: a request that kills workers kills one more per retry.",
    ),
    Option("drain_timeout", "Seconds that running requests may take to finish on shutdown.", settings={"min": 0}),
)
_ADMISSION = (
    Option(
        "max_running_requests",
        "Requests that workers process at the same time. Default: no limit.",
        settings={"min": 1},
    ),
    Option("max_queued_requests", "Requests that wait for admission. Beyond that: 503.", settings={"min": 0}),
    Option("rate_limit", "Requests per second and API key. Beyond that: 429.", settings={"metavar": "N"}),
    Option(
        "rate_limit_burst",
        "Requests that an API key may send at once. Default: the --rate-limit of one second.",
        settings={"metavar": "N"},
    ),
)
_KEYS = (
    Option(
        "api_key_file",
        "File with the keys of clients. Each line: a key, then a name. Clients must present one.",
        settings=_FILE,
    ),
    Option(
        "operator_key_file",
        "File with the keys of operators, needed to add, drain, remove and register workers.",
        settings=_FILE,
    ),
    Option(
        "worker_key_file",
        "File with the key for workers that have --api-key-file. The first key is sent.",
        settings=_FILE,
    ),
    Option(
        "cors_origins",
        "Web pages of this origin may send requests; *: any. Repeatable.",
        name="cors_origin",
        convert=tuple,
        settings={"metavar": "ORIGIN"},
    ),
    Option("ssl_certfile", "PEM certificate: serve https.", settings=_FILE),
    Option("ssl_keyfile", "PEM key of the certificate.", settings=_FILE),
    Option("worker_ssl_ca_certs", "PEM authority of the certificates of workers at https URLs.", settings=_FILE),
    Option(
        "worker_ssl_certfile",
        "PEM certificate for workers that require one (their --ssl-ca-certs).",
        settings=_FILE,
    ),
    Option("worker_ssl_keyfile", "PEM key of --worker-ssl-certfile.", settings=_FILE),
)
_PROCESS = (
    Option("host", "Address to listen on."),
    Option("port", "Port to listen on. 0: any free one.", settings={"min": 0, "max": 65535}),
    Option("log_level", "Least severity that is logged.", choices=LEVELS),
    Option(
        "access_log",
        "Do not log a line per request.",
        name="disable_access_log",
        kind=bool,
        default=False,
        convert=operator.not_,
    ),
    Option(
        "", "Write a JSON file with URL and process id when ready.", name="ready_file", kind=Path | None, settings=_FILE
    ),
    Option("", "End when standard input ends.", name="exit_with_parent", kind=bool, default=False),
    Option("", "", name="fd", kind=int | None, settings={"hidden": True}),
)
ROUTER_OPTIONS = in_sections(
    {
        "Workers": _WORKERS,
        "Routing": _ROUTING,
        "Times and retries": _TIMES,
        "Admission": _ADMISSION,
        "Keys and TLS": _KEYS,
        "Limits": limits("limits"),
        "Process": _PROCESS,
    }
)


def router_config(values: Mapping[str, Any]) -> LBArgs:
    """Return the config of a router from the values of its options. Raises ConfigError."""
    config: LBArgs = fill(LBArgs(), ROUTER_OPTIONS, values)
    return config


@takes((LBArgs(), ROUTER_OPTIONS))
def router(ctx: typer.Context, **values: Any) -> None:
    """Run the router. Its workers are options here, or register themselves (splitserve serve --router URL)."""
    from splitserve.router.process import run_router

    process = {name: values[name] for name in ("ready_file", "fd", "exit_with_parent")}
    raise typer.Exit(run_router(router_config(values), **process))
