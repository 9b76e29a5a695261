"""Ctrl-C and SIGTERM at any moment of any command: one line, exit code 130 or 143, and nothing is left."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.commands import RunningCommand, running_command
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

SERVE = ["--port", "0", "--dtype", "float32", "--threads", "1", "--max-total-tokens", "4096"]
# Seconds of CPU time after which these have started, and wait for requests. The others need more.
START_SECONDS = {"router --port 0": 1.0, "chat --url URL": 1.0}
# Commands by the text that they have printed when the signal hits. "": it hits as soon as they handle signals.
COMMANDS = {
    "serve MODEL": "",
    "router --port 0": "",
    "up MODEL": "starting: router starting, prefill-0 starting",
    "cluster up FILE": "starting: router starting, prefill-0 starting",
    "demo MODEL --dtype float32": "prefill-0 starting",
    "verify MODEL": "prefill-0 starting",
    "chaos MODEL": "starting 2 prefill and 2 decode workers",
    "chat --url URL": "/new starts afresh",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


class ModelList(BaseHTTPRequestHandler):
    """`/v1/models` of a server, for `chat`."""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), ModelList) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def words(text: str, model: Path, folder: Path, url: str) -> list[str]:
    """The command line of a key of COMMANDS."""
    path = folder / "cluster.yaml"
    # JSON is YAML, too.
    path.write_text(json.dumps({"model": str(model), "router": {"port": 0}}))
    found = [{"MODEL": str(model), "FILE": str(path), "URL": url}.get(word, word) for word in text.split()]
    return found + (SERVE if found[0] in ("serve", "up") else [])


def check_end(command: RunningCommand, number: signal.Signals, code: int, line: str) -> None:
    command.children()
    command.send(number)
    assert command.exit_code() == code, command.output
    assert command.output.count(line) == 1, command.output
    for trace in ("Traceback", "Exception ignored", "Aborted"):
        assert trace not in command.output
    command.check_nothing_is_left()


# Commands that start their workers as `verify` does. `make soak` interrupts them, too.
REPEATS = ("demo MODEL --dtype float32", "chaos MODEL")


@pytest.mark.parametrize(
    "text", [pytest.param(text, marks=pytest.mark.soak if text in REPEATS else ()) for text in COMMANDS]
)
def test_an_interrupt_before_it_serves_ends_a_command_with_one_line(model, url, tmp_path, text):
    with running_command(*words(text, model, tmp_path, url), folder=tmp_path) as command:
        command.wait_for_handlers()
        command.wait_for(COMMANDS[text])
        check_end(command, signal.SIGINT, 130, "interrupted: ")
        assert command.output.endswith(" has ended\n")


@pytest.mark.parametrize("text", ["serve MODEL", "verify MODEL"])
def test_sigterm_before_it_serves_does_the_same(model, url, tmp_path, text):
    with running_command(*words(text, model, tmp_path, url), folder=tmp_path) as command:
        command.wait_for_handlers()
        command.wait_for(COMMANDS[text])
        check_end(command, signal.SIGTERM, 143, "terminated: ")


def test_an_interrupt_of_a_benchmark_ends_what_it_has_started(tmp_path):
    with running_command("bench", "router", folder=tmp_path) as command:
        command.wait_for_child()
        check_end(command, signal.SIGINT, 130, "interrupted: splitserve bench router has ended")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_router_that_serves_drains_first(tmp_path, number, code):
    with running_command("router", "--port", "0", folder=tmp_path) as command:
        command.wait_for("router ready")
        check_end(command, number, code, "draining: no requests are running")
        assert command.output.endswith(" stopped: the router has ended\n")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("text", COMMANDS)
def test_an_interrupt_at_a_random_moment_leaves_nothing(model, url, tmp_path, text, seed):
    """The moment is when it has used a random amount of CPU time."""
    rng = random.Random(f"{text} {seed}")
    with running_command(*words(text, model, tmp_path, url), folder=tmp_path) as command:
        command.wait_for_handlers()
        command.wait_for_cpu_seconds(rng.uniform(0.0, START_SECONDS.get(text, 8.0)))
        command.children()
        command.send(signal.SIGINT)
        code = command.exit_code()
        # It may have ended by itself.
        assert code == 130 or (code == 0 and "interrupted" not in command.output), command.output
        for trace in ("Traceback", "Exception ignored", "Aborted"):
            assert trace not in command.output
        command.check_nothing_is_left()
