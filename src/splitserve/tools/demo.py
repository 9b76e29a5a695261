"""`splitserve demo`: one question over a prefill and a decode process, measured and compared with a colocated worker.

1. A router, a prefill worker and a decode worker start as separate processes.
2. The question goes through the router. The answer is printed as it arrives.
3. A colocated worker starts and receives the same question.
4. A table shows the times, and whether both gave the same tokens. All processes end.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from splitserve.core.errors import ClusterError
from splitserve.core.options import size_text
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.process.console import standard_output
from splitserve.tools.bench.stats import mean
from splitserve.tools.chat import StreamedAnswer, stream_chat
from splitserve.tools.client import RequestFailedError, Transfers, call, read_transfers
from splitserve.tools.options import DemoOptions

_READY_TIMEOUT = 300.0
# Tokens in the KV pool of each worker: the demo needs no more.
_POOL_TOKENS = 8192


def run_demo(options: DemoOptions) -> int:
    """Run the demo and return the exit code: 0 if both outputs are equal token for token."""
    console, model = Console(emoji=False, stderr=True), options.model
    resolve_model(model)
    started = time.monotonic()
    worker_args = ["--served-model-name", model, "--max-total-tokens", str(_POOL_TOKENS)]
    try:
        with LocalCluster(LocalDeployment(model=model, dtype=options.dtype, worker_args=worker_args)) as cluster:
            cluster.wait_ready(_READY_TIMEOUT, console)
            start_seconds = time.monotonic() - started
            standard_output().print(f"> {options.prompt}", markup=False, highlight=False)
            prefill_url = cluster.urls(DisaggregationMode.PREFILL)[0]
            # The warm-up and checks of the router moved KV, too.
            before = read_transfers(prefill_url)
            split = _ask(cluster.router_url, options, echo=True)
            transfer = read_transfers(prefill_url) - before
            cluster.add_worker(DisaggregationMode.NULL)
            cluster.wait_ready(_READY_TIMEOUT, console)
            reference_url = cluster.urls(DisaggregationMode.NULL)[0]
            colocated = _ask(reference_url, options, echo=False)
            dtype = call(f"{reference_url}/server_info")["dtype"]
    except (ClusterError, RequestFailedError) as error:
        console.print(f"error: the demo failed: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    equal = split.token_ids == colocated.token_ids and bool(split.token_ids)
    standard_output().print(_table(split, transfer, start_seconds, dtype, equal))
    return 0 if equal else 1


def _ask(url: str, options: DemoOptions, *, echo: bool) -> StreamedAnswer:
    def show(piece: str) -> None:
        if echo:
            sys.stdout.write(piece)
            sys.stdout.flush()

    messages = [{"role": "user", "content": options.prompt}]
    answer = stream_chat(url, options.model, messages, max_tokens=options.max_tokens, temperature=0.0, on_text=show)
    show("\n")
    return answer


def _table(answer: StreamedAnswer, transfer: Transfers, start_seconds: float, dtype: str, equal: bool) -> Table:
    table = Table("", "", show_header=False)
    record, gaps = answer.record, answer.record.itls or [0.0]
    rows = (
        ("prompt tokens", str(record.num_prompt_tokens)),
        ("output tokens", str(record.num_output_tokens)),
        ("start of the processes", f"{start_seconds:.1f} s"),
        ("time to first token", f"{(record.ttft if record.arrived_at else 0.0) * 1e3:.0f} ms"),
        ("inter-token latency, mean", f"{mean(gaps) * 1e3:.1f} ms"),
        ("inter-token latency, largest", f"{max(gaps) * 1e3:.1f} ms"),
        ("KV cache moved", size_text(transfer.num_bytes)),
        ("KV transfer time", f"{transfer.seconds * 1e3:.2f} ms"),
        (f"equal to colocated, token for token, in {dtype}", "yes" if equal else "NO"),
    )
    for name, value in rows:
        table.add_row(name, value)
    return table
