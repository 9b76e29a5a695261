"""Frame times of the web page under load. `make bench-page` runs them; they need an idle machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from support.browser import PROGRAM, open_browser
from support.fake_router import keep_moving, start_fake_router

api = pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(PROGRAM is None, reason="chromium is missing; as root on Debian: make system-packages"),
]
MAX_FRAME_MS = 33.0
NUM_REQUESTS = 10_000
TOKENS_PER_SECOND = 2000
NUM_FRAMES = 200
# Measures the work of frames: from the callback of a frame to the first task after it was painted, and the time
# between frames. With `scrolls` each frame scrolls the list.
MEASURE = """([count, scrolls]) => new Promise((resolve) => {
  const list = document.querySelector(".list");
  const [work, gaps] = [[], []];
  let last = null;
  const channel = new MessageChannel();
  let began = 0;
  channel.port1.onmessage = () => work.push(performance.now() - began);
  const frame = (now) => {
    if (last !== null) gaps.push(now - last);
    last = now;
    began = performance.now();
    if (scrolls && list) list.scrollTop = (list.scrollTop + 400) % (list.scrollHeight - list.clientHeight);
    channel.port2.postMessage(0);
    if (gaps.length < count) requestAnimationFrame(frame);
    else resolve({work, gaps});
  };
  requestAnimationFrame(frame);
})"""
LONG_TASKS = """() => {
  window.longTasks = [];
  new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((e) => e.duration)))
    .observe({type: "longtask"});
}"""


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * q))]


@pytest.mark.parametrize("view", ["requests", "chat", "now"])
async def test_a_frame_takes_at_most_33_ms(view: str) -> None:
    async with start_fake_router(tokens_per_second=TOKENS_PER_SECOND, num_tokens=20_000) as fake:
        fake.add_requests(NUM_REQUESTS)
        async with open_browser(f"{fake.url}/#{view}", viewport={"width": 1280, "height": 860}) as opened:
            await api.expect(opened.page.locator("#connection")).to_have_text("live")
            if view == "requests":
                await api.expect(opened.page.locator(".list")).to_have_attribute("aria-rowcount", f"{NUM_REQUESTS + 1}")
            if view == "chat":
                await opened.page.get_by_label("Message", exact=True).fill("write")
                await opened.page.keyboard.press("Enter")
                await api.expect(opened.page.locator(".message.assistant .text")).to_contain_text("The prefill")
            moving = asyncio.create_task(keep_moving(fake))
            await opened.page.evaluate(LONG_TASKS)
            found = await opened.page.evaluate(MEASURE, [NUM_FRAMES, view == "requests"])
            long_tasks = await opened.page.evaluate("window.longTasks")
            moving.cancel()
            with suppress(asyncio.CancelledError):
                await moving
    figures = {name: [round(quantile(found[name], q), 1) for q in (0.5, 0.99, 1)] for name in ("work", "gaps")}
    print(f"{view}: p50, p99, max ms of work and gaps per frame {figures}, long tasks {long_tasks}")  # noqa: T201
    assert max(found["work"]) <= MAX_FRAME_MS
    assert quantile(found["gaps"], 0.99) <= MAX_FRAME_MS + 1
