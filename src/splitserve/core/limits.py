"""Limits of requests and connections, the same for router and workers; docs/limits.md."""

from __future__ import annotations

from splitserve.core.options import Config, check_ranges, option


class LimitsConfig(Config, frozen=True, kw_only=True):
    """Limits of what one request, one connection or one client address may cost a router or a worker.

    Requests beyond a limit get a 4xx that names the limit. The same values are listed by `/server_info`.
    """

    # None: see `request_bytes`.
    max_request_bytes: int | None = option(
        None,
        "Bytes of a request body. Default: max(1 MiB, 256 x context length).",
        is_bytes=True,
        gt=0,
        aliases="--max-payload-size",
    )
    max_header_bytes: int = option(64 << 10, "Bytes of the request line and headers together.", is_bytes=True, gt=0)
    # On a new connection the time starts when it is accepted.
    header_timeout: float = option(10.0, "Seconds from the first byte of a request to the end of its headers.", gt=0)
    body_timeout: float = option(60.0, "Seconds from the end of the headers to the end of the body.", gt=0)
    send_timeout: float = option(60.0, "Seconds in which a client must read something of its response.", gt=0)
    keep_alive_timeout: float = option(75.0, "Seconds a connection may stay open between two requests.", gt=0)
    # The oldest is closed when one more comes.
    max_idle_connections: int = option(1024, "Connections per client address without a request in progress.", gt=0)
    max_request_memory: int = option(
        512 << 20,
        "Estimated memory of requests that are read, parsed or tokenized, and of logprobs and hidden states until they "
        "are formatted. Beyond that: 503, or 400 if one request alone needs more.",
        is_bytes=True,
        gt=0,
    )
    max_json_depth: int = option(64, "Levels of nested objects and arrays in a body.", gt=0)
    max_messages: int = option(4096, "Messages per chat request.", gt=0)
    max_stop_strings: int = option(64, "Entries of `stop`.", gt=0)
    max_stop_chars: int = option(1024, "Characters per entry of `stop`.", gt=0)
    max_stop_token_ids: int = option(1024, "Entries of `stop_token_ids`.", gt=0)
    max_logit_bias: int = option(1024, "Entries of `logit_bias`.", gt=0)
    max_top_logprobs: int = option(
        128,
        "Alternatives per token (`top_logprobs_num`, `top_logprobs`, `logprobs`). Each metadata row has room for them: "
        "give prefill and decode workers the same value.",
        ge=0,
        aliases="--max-logprobs",
    )
    max_n: int = option(128, "Samples per prompt (`n`).", gt=0)
    max_samples: int = option(4096, "Samples per request, over all its prompts.", gt=0)
    max_rid_chars: int = option(256, "Characters of a request id.", gt=0)
    max_grammar_chars: int = option(256 << 10, "Characters of a JSON schema, regex, EBNF or structural tag.", gt=0)

    def __post_init__(self) -> None:
        check_ranges(self)

    def request_bytes(self, context_length: int) -> int:
        """Return the bytes a body may have if the model's context is `context_length` tokens long."""
        if self.max_request_bytes is not None:
            return self.max_request_bytes
        return max(1 << 20, 256 * context_length)
