"""The web page in a real browser before a running cluster: a chat, its waterfall, a killed worker, filters, charts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from support.browser import PROGRAM, OpenPage, open_browser
from support.commands import RunningCommand, running_command
from support.deployment import MODEL

api = pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(PROGRAM is None, reason="chromium is missing; as root on Debian: make system-packages"),
]
expect = api.expect
OPTIONS = ("--prefill", "1", "--decode", "2", "--threads", "1", "--dtype", "bfloat16", "--max-total-tokens", "8192")
PROMPT = "Write the numbers from 1 to 500 in words, one per line."
# Waits for a running request and returns its decode worker. The browser has each module once, so this is the page's
# own state.
DECODE_WORKER = """async () => {
  const { live } = await import("/ui/live.js");
  for (;;) {
    const found = [...live.requests.values()].find((request) => request.state === "running" && request.workers.decode);
    if (found) return found.workers.decode;
    await new Promise((resolve) => live.addEventListener("change", resolve, { once: true }));
  }
}"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCommand]:
    """The cluster of all tests. A test that kills a worker waits until the next one is ready."""
    folder = tmp_path_factory.mktemp("up")
    with running_command("up", MODEL, "--port", "0", *OPTIONS, folder=folder) as command:
        command.wait_for("Ctrl-C drains and stops")
        yield command
        command.send(signal.SIGINT)
        command.exit_code()


@asynccontextmanager
async def open_page(command: RunningCommand) -> AsyncIterator[OpenPage]:
    url = re.search(r"^ready at (\S+) ", command.output, re.MULTILINE)[1]
    async with open_browser(url) as opened:
        await expect(opened.page.locator("#connection")).to_have_text("live")
        yield opened


def pid_at(command: RunningCommand, url: str) -> int:
    """Return the process id of the worker at `url`, of the table that `up` prints."""
    rows = re.findall(rf"^\S+ +\S+ +ready +\d+ +(\d+) .* {re.escape(url)} ", command.output, re.MULTILINE)
    assert rows, (url, command.output)
    return int(rows[-1])


async def open_view(opened: OpenPage, name: str) -> None:
    await opened.page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()


async def chat(opened: OpenPage, text: str, max_tokens: int) -> None:
    await open_view(opened, "Chat")
    await opened.page.locator(".settings > summary").click()
    await opened.page.get_by_label("Max tokens").fill(str(max_tokens))
    await opened.page.get_by_label("Temperature").fill("0")
    await opened.page.get_by_label("Message", exact=True).fill(text)
    await opened.page.keyboard.press("Enter")


async def test_a_chat_its_waterfall_the_list_and_the_charts(command: RunningCommand) -> None:
    async with open_page(command) as opened:
        await expect(opened.page.locator(".worker[data-state=ready]")).to_have_count(3)
        await chat(opened, "What is the capital of France?", 16)
        await expect(opened.page.locator(".message .muted").last).to_contain_text("tokens in")
        await expect(opened.page.locator(".panel .stage-row", has_text="prefill_chunk").first).to_be_visible()
        tokens = await opened.page.locator(".panel .token").all_text_contents()
        text = await opened.page.locator(".message.assistant .text").text_content()
        # The end token has a logprob and no text.
        assert "".join(tokens).replace("\u21b5", "\n").split("<|im_end|>")[0].split() == text.split()
        await open_view(opened, "Requests")
        await opened.page.get_by_label("State").select_option("done")
        row = opened.page.locator(".rows .request:visible", has_text="done").first
        await row.click()
        await expect(opened.page.locator(".facts")).to_contain_text("/v1/chat/completions")
        await opened.page.get_by_role("button", name="Read the steps").last.click()
        await expect(opened.page.get_by_text("requests on average")).to_be_visible()
        await open_view(opened, "Charts")
        await expect(opened.page.locator(".chart p", has_text="tokens per s")).to_be_visible()
        plot = opened.page.locator(".u-over").first
        box = await plot.bounding_box()
        middle = box["y"] + box["height"] / 2
        await opened.page.mouse.move(box["x"] + box["width"] * 0.9, middle)
        await opened.page.mouse.down()
        await opened.page.mouse.move(box["x"] + box["width"] - 2, middle, steps=4)
        await opened.page.mouse.up()
        follow = opened.page.get_by_role("button", name="Follow the newest")
        await follow.click()
        await expect(follow).to_be_disabled()


async def test_a_killed_worker_and_its_recovery_are_visible_and_the_chat_goes_on(command: RunningCommand) -> None:
    async with open_page(command) as opened:
        # On a busy machine the steps up to the kill take seconds: the answer must last longer.
        await chat(opened, PROMPT, 1500)
        await expect(opened.page.locator(".message.assistant .text")).not_to_be_empty()
        url = await opened.page.evaluate(DECODE_WORKER)
        await open_view(opened, "Now")
        os.kill(pid_at(command, url), signal.SIGKILL)
        lost = opened.page.locator(".worker[data-state=unhealthy], .worker[data-state=gone]")
        await expect(lost).not_to_have_count(0)
        # `up` removes a worker that has died and starts another one.
        gone = opened.page.locator(".events [data-kind=worker_lost], .events [data-kind=worker_removed]")
        await expect(gone.first).to_be_visible()
        await expect(opened.page.locator(".events [data-kind=migration]").first).to_be_visible()
        await expect(opened.page.locator(".worker[data-state=ready]")).to_have_count(3)
        await open_view(opened, "Chat")
        await expect(opened.page.locator(".message .muted").last).to_contain_text("tokens in")
        await expect(opened.page.locator(".panel .facts")).to_contain_text("1 migration)")
        # The killed worker sent no report.
        await expect(opened.page.locator(".panel")).to_contain_text(
            f"Stages of {url.removeprefix('http://')} are missing"
        )
