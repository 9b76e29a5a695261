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
from splitserve.tools.bench.stats import percentile
from splitserve.tools.client import RequestFailedError, open_session, parse_event, served_models, stream

# A message of a conversation: its role and its content.
Message = dict[str, str]


@dataclass(slots=True)
class StreamedAnswer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Seconds from sending the request to the first token.
    ttft: float = 0.0
    # Seconds between tokens. Tokens that arrived in one piece share its gap.
    gaps: list[float] = field(default_factory=list)

    @property
    def mean_itl(self) -> float:
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0

    @property
    def p99_itl(self) -> float:
        return percentile(self.gaps, 99) if self.gaps else 0.0


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
    answer = StreamedAnswer()
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    sent = last = time.monotonic()

    def take(line: bytes) -> None:
        nonlocal last
        event = parse_event(line) or {}
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices") or ():
            if ids := choice.get("token_ids"):
                now = time.monotonic()
                if answer.token_ids:
                    answer.gaps += [(now - last) / len(ids)] * len(ids)
                else:
                    answer.ttft = now - sent
                last = now
                answer.token_ids += ids
            if piece := choice["delta"].get("content"):
                answer.text += piece
                on_text(piece)

    async def run() -> None:
        async with open_session() as session:
            await stream(session, f"{url}/v1/chat/completions", body, take)

    asyncio.run(run())
    return answer


def run_chat(url: str, *, model: str | None, system: str | None, max_tokens: int, temperature: float) -> int:
    """Converse until the end of input, or `/exit`. `/new` starts afresh. Return the exit code.

    Ctrl-C during an answer ends that answer. Raises ConfigError, WorkerUnavailableError.
    """
    console = Console(stderr=True)
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    url = url.removesuffix("/v1")
    try:
        served = served_models(url)
    except RequestFailedError as error:
        raise WorkerUnavailableError(f"no model is served at {url} ({clause(error)}): give --url") from None
    if not served or model not in (None, *served):
        raise ConfigError(f"--model {model}: {url} serves {', '.join(served) or 'no model'}")
    model = model or served[0]
    console.print(f"{model} at {url}; /new starts afresh, /exit or Ctrl-D ends", markup=False, highlight=False)
    messages = list(opening)
    while (line := _read(console)) not in (None, "/exit"):
        if line == "/new":
            messages = list(opening)
        elif line:
            _turn(url, console, model, messages, line, max_tokens, temperature)
    return 0


def _read(console: Console) -> str | None:
    """Return a line of the user. None: the input has ended."""
    try:
        return console.input("> ").strip()
    except EOFError:
        return None


def _turn(
    url: str, console: Console, model: str, messages: list[Message], line: str, max_tokens: int, temperature: float
) -> None:
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
            stream_chat(url, model, asked, max_tokens=max_tokens, temperature=temperature, on_text=show)
        except RequestFailedError as error:
            console.print(f"error: {error}", markup=False, highlight=False)
            return
        except KeyboardInterrupt:
            show(" ...")
    messages[:] = [*asked, {"role": "assistant", "content": "".join(pieces)}]
    sys.stdout.write("\n")
