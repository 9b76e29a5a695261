"""Options of chat, demo, trace, verify and `up`: one class per command, from which the command line follows.

Nothing here imports what a command needs to run. The class's docstring is the command's help text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from splitserve.core.config import ModelConfig, WorkerConfig
from splitserve.core.options import Config, like, option, option_of, repeatable
from splitserve.core.parallel import ParallelConfig, WorkerShape
from splitserve.transfer.transports import USER_BACKENDS

DEFAULT_ROUTER_URL = "http://127.0.0.1:8000"
_DEFAULT_URL = f"the router of the cluster that 'splitserve cluster status' finds, or {DEFAULT_ROUTER_URL}"
# Options that several commands have, those of benchmarks included.
MODEL: str = option(
    "smollm2", "A folder of safetensors, a .gguf file, a Hugging Face name, or the alias smollm2 or smollm2-q4."
)


def _size(config: type[Config], field: str, role: str) -> int:
    what, _, _ = option_of(config, field).help.partition(":")
    # An int without bounds: the shape checks it.
    return option(1, f"{what} of each {role} worker.")


class PairOptions(Config, frozen=True, kw_only=True):
    """Options of the prefill and decode workers of a cluster on this machine."""

    prefill_tp_size: int = _size(ParallelConfig, "tp_size", "prefill")
    prefill_pp_size: int = _size(ParallelConfig, "pp_size", "prefill")
    prefill_dp_size: int = _size(WorkerConfig, "dp_size", "prefill")
    decode_tp_size: int = _size(ParallelConfig, "tp_size", "decode")
    decode_pp_size: int = _size(ParallelConfig, "pp_size", "decode")
    decode_dp_size: int = _size(WorkerConfig, "dp_size", "decode")
    # Zero-copy transfer.
    hand_over: bool = option(
        False, "With shm: workers compute in one KV pool, and pages change owner instead of being copied."
    )
    threads: int | None = like(ModelConfig, "threads")

    @property
    def shapes(self) -> tuple[WorkerShape, WorkerShape]:
        """Return the shapes of prefill and of decode workers. Raises OptionError."""
        return (
            WorkerShape.of("prefill", self.prefill_tp_size, self.prefill_pp_size, self.prefill_dp_size),
            WorkerShape.of("decode", self.decode_tp_size, self.decode_pp_size, self.decode_dp_size),
        )


class UpOptions(Config, frozen=True, kw_only=True):
    """Options of `splitserve up` besides those of its workers and its router."""

    prefill: int = option(1, "Prefill workers.", ge=0)
    decode: int = option(1, "Decode workers.", ge=0)
    null: int = option(0, "Colocated workers (mode null) beside the pairs. Alone with --prefill 0 --decode 0.", ge=0)
    pair: PairOptions = PairOptions()
    cluster_token_file: Path | None = option(
        None,
        "File with the cluster token, if workers of other machines join. Default: a generated token.",
        metavar="FILE",
        env="SPLITSERVE_CLUSTER_TOKEN_FILE",
    )


class DemoOptions(Config, frozen=True, kw_only=True):
    """Answer a question with a prefill and a decode process, show the timings, and compare with a colocated worker."""

    model: str = MODEL
    prompt: str = option("What is the capital of France? Tell me about it.", "Question for the model.")
    max_tokens: int = option(64, "Maximum tokens of the answer.", ge=2)
    dtype: str = like(ModelConfig, "dtype")


class ChatOptions(Config, frozen=True, kw_only=True):
    """Chat with a served model in the terminal."""

    url: str | None = option(None, f"URL of a router or worker. Default: {_DEFAULT_URL}.")
    model: str | None = option(None, "Model in requests. Default: the first one that the server lists.")
    system: str | None = option(None, "System prompt.")
    max_tokens: int = option(512, "Maximum tokens of an answer.", ge=1)
    temperature: float = option(0.7, "Sampling temperature. 0: greedy.", ge=0)


class TraceOptions(Config, frozen=True, kw_only=True):
    """Show where the time of finished requests went, by stage. Without RID: show the latest requests."""

    url: str | None = option(None, f"URL of a router. Default: {_DEFAULT_URL}.")
    rid: str | None = option(
        None, "Id of a request: the client's rid, or the x-request-id of the answer.", metavar="RID", is_argument=True
    )
    slowest: int | None = option(
        None,
        "Show the N slowest requests, by the time of --by.",
        ge=1,
        metavar="N",
    )
    by: str = option(
        "ttft",
        "Time that --slowest compares: up to the first byte, after it, or both.",
        choices=("ttft", "output", "e2e"),
    )
    since: float | None = option(None, "Show requests that began in the last N seconds only.", metavar="N")
    errors: bool = option(False, "Show failed requests only.", decls=("--errors",))
    limit: int | None = option(None, "Requests to show, the latest first. Default: 1.", ge=1)
    whole: bool = option(False, "Show stages shorter than 0.05 ms, too.", decls=("--whole",))
    as_json: bool = option(False, "Print JSON instead of the waterfalls.", decls=("--json",))
    perfetto: Path | None = option(None, "Write a trace for ui.perfetto.dev instead of printing.", metavar="FILE")
    check: bool = option(
        False, "Send requests, and fail unless their stages add up to their TTFT.", decls=("--check",), section="Check"
    )
    requests: int = option(100, "Requests of --check.", ge=1)
    concurrency: int = option(4, "Requests of --check in flight at the same time.", ge=1)


class TopOptions(Config, frozen=True, kw_only=True):
    """Show what a router, its workers and its requests do now. Ctrl-C ends."""

    router: str | None = option(None, "URL of a router, in place of --url.", metavar="URL", is_argument=True)
    url: str | None = option(None, f"URL of a router. Default: {_DEFAULT_URL}.")
    once: bool = option(False, "Print one picture and exit.", decls=("--once",))
    requests: int = option(15, "Requests to show.", ge=0)


class VerifyOptions(Config, frozen=True, kw_only=True):
    """Compare colocated and disaggregated output token by token. Exit code 0: equal. 1: different. 2: failed."""

    model: str = MODEL
    dtype: str | None = like(
        ModelConfig,
        "dtype",
        default=None,
        help="Dtype of the model. Default: the served one (auto), float32 if a worker has several ranks, or bfloat16 "
        "with --quantization.",
    )
    prompts: Path | None = option(
        None,
        'One prompt per line: {"text": ...}, {"input_ids": [...]} or a string. Default: built-in prompts.',
        metavar="FILE.jsonl",
    )
    as_json: bool = option(False, "Print JSON instead of the table.", decls=("--json",))
    max_tokens: int = option(64, "Maximum tokens of an answer.", ge=1)
    transfer_backend: Sequence[str] = repeatable(
        "Transport of the KV cache, repeatable. Default: tcp.", choices=USER_BACKENDS
    )
    all_transports: bool = option(
        False,
        "Compare over each transport of this machine; tcp sends through sockets.",
        decls=("--all-transports",),
    )
    near_ties: bool = option(
        False,
        "Accept logprobs that differ by at most 0.05, and different tokens with such logprobs. For bfloat16 and "
        "float16 without our kernels, as on GPUs: their last bits depend on the batch.",
        decls=("--near-ties",),
    )
    workers: PairOptions = PairOptions()
    quantization: str | None = option(
        None, "Quantize the weights of prefill and decode only, to measure the effect. Exit code 0."
    )

    @property
    def used_dtype(self) -> str:
        if self.dtype is not None:
            return self.dtype
        if self.quantization is not None:
            return "bfloat16"
        # Ranks that share a matrix use torch's kernels and another order of sums: only float32 can prove equality.
        return "auto" if all(shape.tp_size * shape.pp_size == 1 for shape in self.workers.shapes) else "float32"

    @property
    def pair(self) -> str:
        """Return the shapes of the pair in words. Empty: both workers have one rank."""
        prefill, decode = self.workers.shapes
        return "" if prefill == decode == WorkerShape() else f"prefill {prefill} to decode {decode}"
