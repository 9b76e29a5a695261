"""`splitserve chat`: a conversation with a served model in the terminal, streamed."""

from __future__ import annotations

import sys

from openai import OpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam
from rich.console import Console

from splitserve.launch.streaming import open_client, stream_chat


def run_chat(url: str, *, model: str | None, system: str | None, max_tokens: int, temperature: float) -> int:
    """Until the end of input, or `/exit`. `/new` starts afresh. Returns the exit code."""
    console = Console(stderr=True)
    opening: list[ChatCompletionMessageParam] = [] if system is None else [{"role": "system", "content": system}]
    with open_client(url) as client:
        try:
            model = model or client.models.list().data[0].id
        except (OpenAIError, IndexError) as error:
            console.print(f"error: no model is served at {url} ({error}): give --url", markup=False, highlight=False)
            return 1
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
    """Send one question and print its answer. A turn that fails leaves the conversation as it was."""
    asked: list[ChatCompletionMessageParam] = [*messages, {"role": "user", "content": line}]
    try:
        answer = stream_chat(client, model, asked, max_tokens=max_tokens, temperature=temperature, on_text=_show)
    except OpenAIError as error:
        console.print(f"error: {error}", markup=False, highlight=False)
    else:
        _show("\n")
        messages[:] = [*asked, {"role": "assistant", "content": answer.text}]


def _show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
