"""`splitserve chat`: a conversation with a served model in the terminal, streamed."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console

from splitserve.core.errors import ConfigError, WorkerUnavailableError, clause
from splitserve.process.process_end import unwinding
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.client import (
    KeyRejectedError,
    RequestFailedError,
    ServerUnreachableError,
    open_session,
    parse_event,
    router_or_default,
    served_models,
    stream,
)
from splitserve.tools.options import ChatOptions

_COMMANDS = "/new starts afresh, /exit or Ctrl-D ends"
# A message of a conversation: its role and its content.
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    record: StreamRecord
    token_ids: list[int] = field(default_factory=list)


def stream_chat(
    url: str,
    model: str,
    messages: list[Message],
    *,
    max_tokens: int,
    temperature: float,
    on_text: Callable[[str], None],
) -> StreamedAnswer:
    """Send one turn to a server. `on_text` receives each piece of the answer as it arrives.

    Raises RequestFailedError.
    """
    answer = StreamedAnswer(StreamRecord(time.perf_counter()))
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    record = answer.record

    def take(line: bytes) -> None:
        event = parse_event(line) or {}
        if usage := event.get("usage"):
            record.num_prompt_tokens, record.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices") or ():
            if ids := choice.get("token_ids"):
                record.arrived_at.append(time.perf_counter())
                answer.token_ids.extend(ids)
            if piece := choice["delta"].get("content"):
                on_text(piece)

    async def run() -> None:
        async with open_session() as session:
            await stream(session, f"{url}/v1/chat/completions", body, take)

    asyncio.run(run())
    return answer


def run_chat(options: ChatOptions) -> int:
    """Converse until the end of input, or `/exit`. `/new` starts afresh. Return the exit code.

    Ctrl-C during an answer ends that answer. Raises ConfigError, RequestFailedError, WorkerUnavailableError.
    """
    console = Console(emoji=False, stderr=True)
    opening: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
    url, model = router_or_default(options.url).removesuffix("/v1"), options.model
    try:
        served = served_models(url)
    except (ServerUnreachableError, KeyRejectedError):
        raise
    except RequestFailedError as error:
        raise WorkerUnavailableError(f"no model is served at {url} ({clause(error)}): give --url") from None
    if not served or model not in (None, *served):
        raise ConfigError(f"--model {model}: {url} serves {', '.join(served) or 'no model'}")
    model = model or served[0]
    console.print(f"{model} at {url}; {_COMMANDS}", markup=False, highlight=False)
    messages = list(opening)
    while (line := _read(console)) not in (None, "/exit"):
        if line == "/new":
            messages = list(opening)
        elif line and line.startswith("/"):
            console.print(f"{line.split()[0]} is no command: {_COMMANDS}", markup=False, highlight=False)
        elif line:
            _turn(url, console, model, messages, line, options)
    return 0


def _read(console: Console) -> str | None:
    """Return a line of the user. None: the input has ended."""
    try:
        return console.input("> ").strip()
    except EOFError:
        return None


def _turn(url: str, console: Console, model: str, messages: list[Message], line: str, options: ChatOptions) -> None:
    """Send one question and print its answer. A turn that fails leaves the conversation as it was.

    An interrupted answer stays in the conversation as far as it was printed.
    """
    asked = [*messages, {"role": "user", "content": line}]
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()

    with unwinding():
        try:
            stream_chat(url, model, asked, max_tokens=options.max_tokens, temperature=options.temperature, on_text=show)
        except RequestFailedError as error:
            console.print(f"error: {error}", markup=False, highlight=False)
            return
        except KeyboardInterrupt:
            show(" ...")
    messages[:] = [*asked, {"role": "assistant", "content": "".join(pieces)}]
    sys.stdout.write("\n")
