"""`splitserve chat`: a conversation with a served model in the terminal, streamed."""

from __future__ import annotations

import sys

from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console

from splitserve.core.errors import ConfigError, WorkerUnavailableError, clause
from splitserve.process.process_end import unwinding
from splitserve.tools.streaming import open_client, stream_chat


def run_chat(url: str, *, model: str | None, system: str | None, max_tokens: int, temperature: float) -> int:
    """Converse until the end of input, or `/exit`. `/new` starts afresh. Return the exit code.

    Ctrl-C during an answer ends that answer. Raises ConfigError, WorkerUnavailableError.
    """
    console = Console(stderr=True)
    opening: list[ChatCompletionMessageParam] = [] if system is None else [{"role": "system", "content": system}]
    with open_client(url) as client:
        try:
            served = [found.id for found in client.models.list()]
        except OpenAIError as error:
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
                _turn(client, console, model, messages, line, max_tokens, temperature)
    return 0


def _read(console: Console) -> str | None:
    """Return a line of the user. None: the input has ended."""
    try:
        return console.input("> ").strip()
    except EOFError:
        return None


def _turn(
    client: OpenAI,
    console: Console,
    model: str,
    messages: list[ChatCompletionMessageParam],
    line: str,
    max_tokens: int,
    temperature: float,
) -> None:
    """Send one question and print its answer. A turn that fails leaves the conversation as it was.

    An interrupted answer stays in the conversation as far as it was printed.
    """
    asked: list[ChatCompletionMessageParam] = [*messages, {"role": "user", "content": line}]
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()

    with unwinding():
        try:
            stream_chat(client, model, asked, max_tokens=max_tokens, temperature=temperature, on_text=show)
        except OpenAIError as error:
            console.print(f"error: {error}", markup=False, highlight=False)
            return
        except KeyboardInterrupt:
            show(" ...")
    messages[:] = [*asked, {"role": "assistant", "content": "".join(pieces)}]
    sys.stdout.write("\n")
