"""The web page in a real browser, before a fake router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.browser import PROGRAM, OpenPage, open_browser, shared_browser
from support.fake_router import start_fake_router

api = pytest.importorskip("playwright.async_api")
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="chromium is missing; as root on Debian: make system-packages"),
    pytest.mark.asyncio(loop_scope="module"),
]
expect = api.expect
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
WIDE_LIGHT: dict[str, Any] = {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"}
NARROW_DARK: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
VIEWS = ("Now", "Requests", "Charts", "Operate", "Chat")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def one_browser() -> AsyncIterator[None]:
    async with shared_browser():
        yield


async def open_view(opened: OpenPage, name: str) -> None:
    await opened.page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()
    await expect(opened.page.get_by_role("heading", name=name, exact=True)).to_be_visible()


async def send_chat(opened: OpenPage, text: str) -> None:
    await opened.page.get_by_label("Message", exact=True).fill(text)
    await opened.page.keyboard.press("Enter")


async def is_live(opened: OpenPage) -> None:
    await expect(opened.page.locator("#connection")).to_have_text("live")


@pytest.mark.parametrize("options", [WIDE_LIGHT, NARROW_DARK], ids=["wide and light", "narrow and dark"])
async def test_all_views_are_accessible_and_load_nothing_from_elsewhere(options: dict[str, Any]) -> None:
    async with start_fake_router() as fake:
        fake.add_requests(60)
        async with open_browser(fake.url, **options) as opened:
            await is_live(opened)
            fake.publish(events=[{"kind": "worker_lost", "text": "decode-3 does not answer"}])
            for name in VIEWS:
                await open_view(opened, name)
                assert await opened.violations() == [], name
                width = await opened.page.evaluate("document.documentElement.scrollWidth")
                assert width <= options["viewport"]["width"], name
            await send_chat(opened, "hello")
            await expect(opened.page.locator(".panel .waterfall")).to_be_visible()
            assert await opened.violations() == []
            await opened.page.goto(f"{fake.url}/#requests/request-000040")
            await opened.page.locator(".stage-row summary").first.click()
            assert await opened.violations() == []
            await open_view(opened, "Operate")
            await opened.page.get_by_role("button", name="Flush the prefix cache").click()
            assert await opened.violations() == []
            assert {address.split("/")[2] for address in opened.addresses} == {fake.url.split("/")[2]}


async def test_a_lost_worker_and_the_migration_of_its_request_are_visible() -> None:
    async with start_fake_router() as fake, open_browser(fake.url) as opened:
        await is_live(opened)
        card = opened.page.locator(".worker", has_text="decode-3")
        await expect(card.locator(".state")).to_have_text("ready")
        fake.workers[2] |= {"state": "unhealthy", "reason": "connection refused"}
        moved = fake.add_requests(1, migrations=1)[0]
        news = [
            {"kind": "worker_lost", "text": "decode-3 does not answer"},
            {"kind": "migration", "text": "A request moved to decode-4", "rid": moved["rid"]},
        ]
        fake.publish([moved], news)
        await expect(card.locator(".state")).to_have_text("unhealthy: connection refused")
        await expect(opened.page.locator(".events li")).to_have_count(2)
        fake.workers[2] |= {"state": "ready", "reason": ""}
        fake.publish()
        await expect(card.locator(".state")).to_have_text("ready")
        await opened.page.locator(".events").get_by_role("link", name="request").click()
        await expect(opened.page.locator(".waterfall")).to_be_visible()


async def test_filters_reduce_the_list_to_what_they_name() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(200)
        fake.add_requests(3, state="running", e2e_ms=None)
        async with open_browser(fake.url + "/#requests") as opened:
            total = opened.page.locator("#view > [role=status]")
            await expect(total).to_have_text("203 of 203 requests")
            await opened.page.get_by_label("State").select_option("running")
            await expect(total).to_have_text("3 of 203 requests")
            await opened.page.get_by_label("State").select_option("")
            await opened.page.get_by_label("Errors").check()
            await expect(total).to_have_text("4 of 203 requests")
            await opened.page.get_by_label("Errors").uncheck()
            await opened.page.get_by_label("Slowest 5 %").check()
            await opened.page.get_by_label("Order").select_option("ttft")
            await expect(opened.page.locator(".rows .request:visible").first).to_contain_text("request-000080")
            await opened.page.get_by_label("Slowest 5 %").uncheck()
            await opened.page.get_by_label("Worker").select_option(fake.workers[0]["url"])
            await expect(total).to_have_text("102 of 203 requests")
            await opened.page.get_by_label("Search id").fill("000040")
            await expect(total).to_have_text("1 of 203 requests")


async def test_a_list_of_ten_thousand_requests_has_few_rows_and_is_used_by_keyboard() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(10_000)
        async with open_browser(fake.url + "/#requests") as opened:
            grid = opened.page.get_by_role("grid", name="Requests")
            await expect(grid).to_have_attribute("aria-rowcount", "10001")
            assert await opened.page.locator(".rows .request").count() < 60
            await grid.focus()
            await opened.page.keyboard.press("End")
            await expect(opened.page.locator(".rows .request.active")).to_contain_text("request-000000")
            await opened.page.keyboard.press("ArrowUp")
            await opened.page.keyboard.press("Enter")
            await expect(opened.page.locator(".facts")).to_contain_text("request-000001")


async def test_a_waterfall_explains_its_stages_and_names_the_requests_of_the_same_steps() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(60)
        async with open_browser(fake.url + "/#requests/request-000040") as opened:
            causes = opened.page.locator(".causes")
            await expect(causes).to_contain_text("prefill_chunk (prefill) 718 ms, 68 %, 640 of")
            await expect(causes).to_contain_text("tokens of its steps; transfer (prefill) 123 ms, 12 %")
            await expect(causes).to_contain_text("The worker computes a part of the prompt in one step.")
            row = opened.page.locator(".stage-row", has_text="transfer").first
            await row.locator("summary").focus()
            await opened.page.keyboard.press("Enter")
            await expect(row).to_contain_text("A part of the KV cache moves to the decode worker")
            await expect(row).to_contain_text("bytes 25165824")
            await opened.page.get_by_role(
                "button", name="Read the steps: Other requests in the same decode steps"
            ).click()
            await expect(opened.page.get_by_text("31 steps with 6.0 requests on average.")).to_be_visible()
            await opened.page.get_by_role("link", name="request-000002").click()
            await expect(opened.page.locator(".facts")).to_contain_text("request-000002")


# Widths of the bars of stages, in parts of the track's width.
BARS = """() => [...document.querySelectorAll(".stage-row")].map((row) => {
  const [bar, track] = [".bar", ".track"].map((part) => row.querySelector(part).getBoundingClientRect());
  const seen = Math.max(0, Math.min(bar.right, track.right) - bar.left);
  return [row.querySelector("summary span").textContent, seen / track.width];
})"""


async def test_a_waterfall_ends_at_the_first_token_until_the_whole_answer_is_requested() -> None:
    async with start_fake_router() as fake:
        # TTFT 1,060 ms of 3,160 ms. Its chunks take 400 and 310 ms.
        fake.add_requests(60)
        async with open_browser(fake.url + "/#requests/request-000040", **WIDE_LIGHT) as opened:
            whole = opened.page.get_by_label("Up to the end of the answer")
            await expect(whole).not_to_be_checked()
            bars = await opened.page.evaluate(BARS)
            widths = [width for name, width in bars if name == "prefill_chunk"]
            assert widths == [pytest.approx(0.387, abs=0.02), pytest.approx(0.290, abs=0.02)]
            assert dict(bars)["decode"] == pytest.approx(0.0, abs=0.02)
            await expect(opened.page.locator(".scale")).to_contain_text("1060 ms")
            await whole.focus()
            await opened.page.keyboard.press("Space")
            await expect(opened.page.locator(".scale")).to_contain_text("3160 ms")
            bars = await opened.page.evaluate(BARS)
            assert dict(bars)["decode"] == pytest.approx(0.66, abs=0.02)
            assert next(width for name, width in bars if name == "prefill_chunk") < 0.15


async def test_the_stage_with_the_largest_part_is_bold_and_its_share_of_the_steps_is_named() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(60)
        async with open_browser(fake.url + "/#requests/request-000040") as opened:
            await expect(opened.page.locator(".causes")).to_contain_text("68 %, 640 of the 812 tokens of its steps;")
            bold = """() => [...document.querySelectorAll(".stage-row .stage")].filter((row) =>
                getComputedStyle(row).fontWeight >= 600).map((row) => row.firstChild.textContent)"""
            assert await opened.page.evaluate(bold) == ["prefill_chunk", "prefill_chunk"]


async def test_the_requests_that_delayed_a_prompt_are_named() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(60)
        async with open_browser(fake.url + "/#requests/request-000040") as opened:
            title = "Other requests in the steps while the prompt waited and was computed"
            await opened.page.get_by_role("button", name=f"Read the steps: {title}").click()
            # Both steps of its prompt, and the five that ended while it waited.
            await expect(opened.page.get_by_text("7 steps with 6.0 requests on average.")).to_be_visible()


async def test_stages_that_a_dead_worker_did_not_report_are_mentioned() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(60)
        fake.silent_workers = ["http://10.0.0.9:8000"]
        async with open_browser(fake.url + "/#requests/request-000040") as opened:
            await expect(opened.page.get_by_text("Stages of 10.0.0.9:8000 are missing")).to_be_visible()


async def test_a_waterfall_has_the_error_that_the_client_received() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(60)
        async with open_browser(fake.url + "/#requests/request-000007") as opened:
            await expect(opened.page.locator(".facts")).to_contain_text("the decode worker went away: try again")


async def test_no_view_is_wider_than_a_phone() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(60)
        async with open_browser(fake.url, **NARROW_DARK) as opened:
            await is_live(opened)
            await open_view(opened, "Chat")
            await send_chat(opened, "A question with a title as long as titles can become, for the list")
            await expect(opened.page.locator(".panel .waterfall")).to_be_visible()
            for name in VIEWS:
                await open_view(opened, name)
                widths = await opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
                assert widths[0] <= widths[1], (name, widths)
            await open_view(opened, "Operate")
            table = await opened.page.locator(".orders").evaluate("(e) => [e.scrollWidth, e.parentNode.clientWidth]")
            assert table[0] <= table[1], table


async def test_a_request_without_a_record_says_why() -> None:
    # The browser itself logs the status 404.
    async with start_fake_router() as fake, open_browser(fake.url + "/#requests/unknown", fails=True) as opened:
        await expect(opened.page.get_by_text("The router has no timeline of this request.")).to_be_visible()


async def test_a_drag_over_a_chart_zooms_and_leads_to_the_requests_of_that_time() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(3000)
        async with open_browser(fake.url + "/#charts", **WIDE_LIGHT) as opened:
            plot = opened.page.locator(".u-over").first
            await expect(plot).to_be_visible()
            await expect(opened.page.locator(".chart p", has_text="tokens per s")).to_be_visible()
            status = opened.page.locator("#view > [role=status]")
            before = await status.text_content()
            box = await plot.bounding_box()
            middle = box["y"] + box["height"] / 2
            await opened.page.mouse.move(box["x"] + box["width"] * 0.6, middle)
            await opened.page.mouse.down()
            await opened.page.mouse.move(box["x"] + box["width"] * 0.7, middle, steps=4)
            await opened.page.mouse.up()
            await expect(status).not_to_have_text(before)
            await expect(opened.page.get_by_role("button", name="Follow the newest")).to_be_enabled()
            await opened.page.get_by_role("button", name="Requests of this period").click()
            await expect(opened.page.get_by_role("button", name="show all times")).to_be_visible()
            text = await opened.page.locator("#view > [role=status]").text_content()
            assert 0 < int(text.split(" of ")[0].replace(",", "")) < 3000
            await opened.page.get_by_role("button", name="show all times").click()
            await expect(opened.page.locator("#view > [role=status]")).to_have_text("3,000 of 3,000 requests")


# First chart: whether its leftmost pixels are drawn, and the number of pixels in the color of its series.
PIXELS = """() => {
  const canvas = document.querySelector(".chart canvas");
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const edge = all.some((alpha, i) => i % 4 === 3 && (i >> 2) % canvas.width < 2 && alpha > 0);
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--series-0").trim();
  const color = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  let found = 0;
  for (let i = 0; i < all.length; i += 4) if (color.every((value, k) => Math.abs(all[i + k] - value) < 24)) found += 1;
  return [edge, found];
}"""


async def test_the_labels_of_a_chart_are_complete_and_a_single_second_is_a_point() -> None:
    async with start_fake_router() as fake:
        # Values of the first series, TTFT: one second of load.
        fake.ttft_values = {300: 7500.0}
        async with open_browser(fake.url + "/#charts", **WIDE_LIGHT) as opened:
            await expect(opened.page.locator(".chart p", has_text="tokens per s")).to_be_visible()
            await expect(opened.page.locator(".chart canvas").first).to_be_visible()
            edge, found = await opened.page.evaluate(PIXELS)
            assert not edge
            assert found >= 8


async def test_charts_are_zoomed_by_keyboard_too() -> None:
    async with start_fake_router() as fake, open_browser(fake.url + "/#charts") as opened:
        await expect(opened.page.locator(".chart p", has_text="tokens per s")).to_be_visible()
        follow = opened.page.get_by_role("button", name="Follow the newest")
        await expect(follow).to_be_disabled()
        await opened.page.get_by_role("button", name="Zoom in").press("Enter")
        await expect(follow).to_be_enabled()
        await follow.press("Enter")
        await expect(follow).to_be_disabled()


async def test_an_order_states_its_consequence_before_it_is_sent() -> None:
    async with start_fake_router() as fake, open_browser(fake.url + "/#operate") as opened:
        await opened.page.get_by_role("button", name="Drain 10.0.0.3:8000").click()
        dialog = opened.page.get_by_role("dialog")
        await expect(dialog).to_contain_text("1 other decode worker will serve.")
        await opened.page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        assert fake.orders == []
        fake.workers[3]["state"] = "draining"
        fake.publish()
        await expect(opened.page.get_by_role("button", name="Drain 10.0.0.4:8000")).to_be_disabled()
        await opened.page.get_by_role("button", name="Drain 10.0.0.3:8000").click()
        await expect(dialog).to_contain_text("No other decode worker is ready")
        await dialog.get_by_label("Move running requests to other workers now").check()
        await dialog.get_by_role("button", name="Drain 10.0.0.3:8000").click()
        await expect(opened.page.get_by_text("Drain 10.0.0.3:8000: done.")).to_be_visible()
        await opened.page.get_by_role("button", name="Change the role of 10.0.0.1:8000").click()
        await dialog.get_by_label("New role").select_option("decode")
        await dialog.get_by_role("button", name="Change the role of 10.0.0.1:8000").click()
        await expect(dialog).to_be_hidden()
        await opened.page.get_by_role("button", name="Flush the prefix cache").click()
        await dialog.get_by_role("button", name="Flush the prefix cache").click()
        await expect(opened.page.get_by_text("Flush the prefix cache: done.")).to_be_visible()
        prefill, decode = fake.workers[0]["url"], fake.workers[2]["url"]
        assert fake.orders == [
            ("/workers/drain", {"url": decode, "migrate": True, "force": True}),
            ("/role", {"url": prefill, "role": "decode", "drain": "complete"}),
            ("/flush_cache", {}),
        ]


async def test_without_an_operators_key_orders_are_disabled() -> None:
    async with start_fake_router(can_operate=False) as fake, open_browser(fake.url + "/#operate") as opened:
        await expect(opened.page.get_by_text("These orders need an operator's key.")).to_be_visible()
        for button in await opened.page.locator("#view button").all():
            await expect(button).to_be_disabled()


async def test_a_chat_is_streamed_with_settings_logprobs_and_a_waterfall() -> None:
    async with start_fake_router() as fake, open_browser(fake.url + "/#chat") as opened:
        await opened.page.get_by_text("Settings").click()
        await opened.page.get_by_label("System prompt").fill("Be short.")
        await opened.page.get_by_label("Temperature").fill("0")
        await opened.page.get_by_label("Max tokens").fill("40")
        await send_chat(opened, HOSTILE)
        await expect(opened.page.locator(".message .muted").last).to_contain_text("24 tokens")
        await expect(opened.page.locator(".panel .token")).to_have_count(24)
        await expect(opened.page.locator(".panel .waterfall")).to_be_visible()
        await opened.page.locator(".panel .token").nth(3).focus()
        await expect(opened.page.locator(".panel [role=status]").first).to_contain_text('"<b>"')
        await expect(opened.page.locator(".message.user .text")).to_have_text(HOSTILE)
        assert await opened.page.title() == "Chat - Splitserve"
        body = fake.chats[0]
        assert body["messages"] == [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": HOSTILE},
        ]
        assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("fake", 0, 40, True)
        await opened.page.get_by_role("button", name="Retry").click()
        await expect(opened.page.locator(".message")).to_have_count(2)
        await opened.page.get_by_role("button", name="Edit").click()
        await opened.page.get_by_role("dialog").get_by_label("Message").fill("second text")
        await opened.page.get_by_role("button", name="Send again").click()
        await expect(opened.page.locator(".message.user .text")).to_have_text("second text")
        await expect(opened.page.locator(".message .muted").last).to_contain_text("24 tokens")
        assert [chat["messages"][-1]["content"] for chat in fake.chats] == [HOSTILE, HOSTILE, "second text"]


async def test_a_stopped_answer_keeps_its_text() -> None:
    async with start_fake_router(stops_after=5) as fake, open_browser(fake.url + "/#chat") as opened:
        await send_chat(opened, "hello")
        await expect(opened.page.locator(".message.assistant .text")).to_contain_text("The prefill worker computes the")
        await opened.page.get_by_role("button", name="Stop").click()
        await expect(opened.page.locator(".message .muted").last).to_have_text("stopped")
        await expect(opened.page.locator(".message.assistant .text")).to_contain_text("The prefill worker computes the")
        await expect(opened.page.get_by_role("button", name="Send")).to_be_enabled()


async def test_conversations_stay_in_the_browser_and_travel_as_json(tmp_path: Path) -> None:
    async with start_fake_router() as fake, open_browser(fake.url + "/#chat") as opened:
        await send_chat(opened, "remember me")
        await expect(opened.page.locator(".message .muted").last).to_contain_text("24 tokens")
        await opened.page.reload()
        await expect(opened.page.locator(".message.user .text")).to_have_text("remember me")
        async with opened.page.expect_download() as download:
            await opened.page.get_by_role("button", name="Export").click()
        file = tmp_path / "chats.json"
        await (await download.value).save_as(file)
        assert json.loads(file.read_text())[0]["messages"][0]["content"] == "remember me"
        await opened.page.get_by_role("button", name="Delete").click()
        await expect(opened.page.locator(".message")).to_have_count(0)
        await opened.page.get_by_label("File with conversations").set_input_files(file)
        await expect(opened.page.locator(".message.user .text")).to_have_text("remember me")
        file.write_text('{"messages": 1}')
        await opened.page.get_by_label("File with conversations").set_input_files(file)
        await expect(opened.page.get_by_text("The import failed")).to_be_visible()


async def test_the_page_asks_for_a_key_and_keeps_it_in_the_session() -> None:
    # The browser itself logs the status 401.
    async with start_fake_router(key="client-key-0123456789") as fake, open_browser(fake.url, fails=True) as opened:
        field, use = opened.page.get_by_label("API key"), opened.page.get_by_role("button", name="Use this key")
        await opened.page.get_by_label("API key", exact=True).last.fill("wrong-key-0123456789")
        await use.click()
        await expect(opened.page.get_by_text("this API key is unknown")).to_be_visible()
        assert await opened.violations() == []
        await field.last.fill("client-key-0123456789")
        await use.click()
        await is_live(opened)
        await expect(opened.page.locator(".worker", has_text="prefill-1")).to_be_visible()
        assert await opened.page.evaluate("Object.values(sessionStorage)") == ["client-key-0123456789"]
        assert "client-key" not in await opened.page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert not any("client-key" in address for address in opened.addresses)


async def test_a_stream_that_ends_is_opened_again() -> None:
    async with start_fake_router() as fake, open_browser(fake.url, fails=True) as opened:
        await is_live(opened)
        fake.end_streams()
        await expect(opened.page.locator("#connection")).to_have_text("reconnecting")
        fake.workers[0]["name"] = "renamed"
        await is_live(opened)
        await expect(opened.page.locator(".worker", has_text="renamed")).to_be_visible()


async def test_the_colors_of_the_user_outlive_a_reload() -> None:
    async def background(opened: OpenPage) -> str:
        return str(await opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    async with start_fake_router() as fake, open_browser(fake.url, color_scheme="light") as opened:
        light = await background(opened)
        await opened.page.get_by_label("Colors").select_option("dark")
        dark = await background(opened)
        assert dark != light
        await opened.page.reload()
        await is_live(opened)
        assert await background(opened) == dark


async def test_hostile_data_of_the_router_stays_text() -> None:
    async with start_fake_router() as fake:
        fake.add_requests(1, error=HOSTILE, status=502)
        fake.workers[0] |= {"name": HOSTILE, "reason": HOSTILE}
        async with open_browser(fake.url) as opened:
            await is_live(opened)
            fake.publish(events=[{"kind": "retry", "text": HOSTILE}])
            await expect(opened.page.locator(".events li")).to_contain_text(HOSTILE)
            await expect(opened.page.locator("h4").first).to_have_text(HOSTILE)
            await open_view(opened, "Requests")
            await opened.page.locator(".rows .request").first.click()
            await expect(opened.page.locator(".facts")).to_contain_text(HOSTILE)
            assert await opened.page.locator("img").count() == 0
