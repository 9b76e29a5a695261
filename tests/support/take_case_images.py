"""Program that takes the pictures of docs/why-slow.md: per case, the timeline of its slowest request on the page.

`make case-images` runs it. Each case starts real workers, so all six take some minutes.
"""

from __future__ import annotations

import asyncio
import runpy
import signal
import sys
from pathlib import Path

from playwright.async_api import expect

from splitserve.process.owned_folder import OwnedFolder
from splitserve.tools.client import call
from support.browser import open_browser
from support.commands import running_command

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "why_slow.py"
FOLDER = ROOT / "docs" / "images"
SIZE = {"width": 1000, "height": 700}


async def take(url: str, case: str, *, is_whole: bool) -> None:
    """Take the picture of the timeline at `url`. `is_whole`: up to the end of the answer."""
    async with open_browser(url, viewport=SIZE, color_scheme="light") as opened:
        timeline = opened.page.locator(".waterfall")
        await expect(timeline).to_be_visible()
        if is_whole:
            await opened.page.get_by_label("Up to the end of the answer").check()
        await timeline.screenshot(path=FOLDER / f"slow-{case}.png", animations="disabled")


def main() -> None:
    for name, case in runpy.run_path(str(EXAMPLE))["CASES"].items():
        by = "output" if case.is_after_first_byte else "ttft"
        with (
            OwnedFolder() as folder,
            running_command(name, "--stay", folder=folder, program=(sys.executable, str(EXAMPLE))) as running,
        ):
            running.wait_for("Enter stops it")
            print(running.output)  # noqa: T201
            url = running.output.split("--url ")[1].split()[0]
            rid = call(f"{url}/v1/traces?slowest=1&by={by}")["traces"][0]["rid"]
            asyncio.run(take(f"{url}/#requests/{rid}", name, is_whole=case.is_after_first_byte))
            running.send(signal.SIGINT)
            running.exit_code()


if __name__ == "__main__":
    main()
