"""`splitserve chat`: which model it takes, and what ends an answer or the conversation."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError, SplitserveError, WorkerUnavailableError
from splitserve.tools import chat
from splitserve.tools.chat import run_chat
from splitserve.tools.client import KeyRejectedError, RequestFailedError
from splitserve.tools.options import ChatOptions
from support.router_world import start_router

Stream = Callable[[list[dict[str, str]], Callable[[str], None]], None]


class Conversation:
    """A terminal with a list of input lines, and a server with a list of answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, served: list[str] | RequestFailedError) -> None:
        self.lines: list[str | BaseException] = []
        self.answers: list[Stream] = []
        # (model, messages) of each request.
        self.requests: list[tuple[str, list[str]]] = []
        self._served = served
        monkeypatch.setattr(chat, "served_models", self._models)
        monkeypatch.setattr(chat, "stream_chat", self._stream)
        monkeypatch.setattr(Console, "input", self._input)

    def _models(self, url: str) -> list[str]:
        if isinstance(self._served, RequestFailedError):
            raise self._served
        return self._served

    def _stream(self, url: str, model: str, messages: list[dict[str, str]], **options: Any) -> None:
        self.requests.append((model, [message["content"] for message in messages]))
        self.answers.pop(0)(messages, options["on_text"])

    def _input(self, *_: object) -> str:
        if not self.lines:
            raise EOFError
        line = self.lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


def run(model: str | None = None) -> int:
    return run_chat(ChatOptions(url="http://h:1", model=model, max_tokens=4, temperature=0.0))


def answer(text: str) -> Stream:
    return lambda messages, on_text: on_text(text)


def interrupted(messages: list[dict[str, str]], on_text: Callable[[str], None]) -> None:
    on_text("half")
    raise KeyboardInterrupt


def failing(messages: list[dict[str, str]], on_text: Callable[[str], None]) -> None:
    raise RequestFailedError("gone")


@pytest.mark.parametrize(
    ("served", "model", "error", "message"),
    [
        (["m", "n"], "nope", ConfigError, "--model nope: http://h:1 serves m, n"),
        ([], None, ConfigError, "serves no model"),
        (RequestFailedError("Connection error."), None, WorkerUnavailableError, r"\(Connection error\): give --url"),
    ],
)
def test_a_model_that_is_not_served_ends_the_chat_before_it_begins(
    served: list[str] | RequestFailedError,
    model: str | None,
    error: type[SplitserveError],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Conversation(monkeypatch, served).lines = [AssertionError("no prompt")]
    with pytest.raises(error, match=message):
        run(model)


def test_an_interrupted_answer_returns_to_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Conversation(monkeypatch, ["m"])
    world.lines, world.answers = ["one", "two"], [interrupted, answer("2")]
    assert run() == 0
    assert world.requests == [("m", ["one"]), ("m", ["one", "half ...", "two"])]


def test_a_failed_answer_leaves_the_conversation_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Conversation(monkeypatch, ["m", "n"])
    world.lines, world.answers = ["one", "two", "/new", "three"], [failing, answer("2"), answer("3")]
    assert run("n") == 0
    assert world.requests == [("n", ["one"]), ("n", ["two"]), ("n", ["three"])]


def test_a_line_that_looks_like_a_command_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Conversation(monkeypatch, ["m"])
    world.lines = ["/help me", "/exit"]
    assert run() == 0
    assert not world.requests
    assert "/help is no command: /new starts afresh, /exit or Ctrl-D ends\n" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "wrong-key-0123456789"])
async def test_a_rejected_key_ends_the_chat_with_the_error_of_the_server(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-a-client-0123\n")
    monkeypatch.setenv("SPLITSERVE_API_KEY", key)
    async with start_router(api_key_file=keys) as url:
        options = ChatOptions(url=url, model=None, max_tokens=4, temperature=0.0)
        with pytest.raises(KeyRejectedError, match=f"^{url}/v1/models: HTTP 401: .*key.*SPLITSERVE_API_KEY$"):
            await asyncio.to_thread(run_chat, options)


def test_an_interrupt_at_the_prompt_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    Conversation(monkeypatch, ["m"]).lines = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        run()


class Server(BaseHTTPRequestHandler):
    """Serve one model with endless answers."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        choice = {"index": 0, "delta": {"content": "begun"}, "finish_reason": None}
        self.wfile.write(b"data: " + json.dumps({"id": "1", "choices": [choice]}).encode() + b"\n\n")
        self.close_connection = True
        # Until the client closes its end.
        self.rfile.read(1)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.mark.process
def test_the_first_interrupt_ends_the_answer_and_the_one_at_the_prompt_the_chat() -> None:
    with ExitStack() as closing:
        server = closing.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Server))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        closing.callback(server.shutdown)
        command = [sys.executable, "-m", "splitserve", "chat", "--url", f"http://127.0.0.1:{server.server_port}"]
        chatting = closing.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
        closing.callback(chatting.kill)
        timer = threading.Timer(120, chatting.kill)
        timer.start()
        closing.callback(timer.cancel)
        standard_input, standard_output = chatting.stdin, chatting.stdout
        assert standard_input is not None
        assert standard_output is not None

        def read_until(end: bytes) -> None:
            output = b""
            while not output.endswith(end):
                piece = standard_output.read1()
                assert piece, output
                output += piece

        for text in (b"one\n", b"two\n"):
            standard_input.write(text)
            standard_input.flush()
            read_until(b"begun")
            chatting.send_signal(signal.SIGINT)
        read_until(b"...\n> ")
        chatting.send_signal(signal.SIGINT)
        assert chatting.wait() == 130
        assert b"Traceback" not in standard_output.read()
