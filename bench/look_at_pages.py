"""Take pictures of report and dashboard in a real browser: `python bench/look_at_pages.py [RUN] [--out FOLDER]`.

Without RUN it plants one behind a real control socket. Needs Chromium (Debian: `apt-get install chromium`). Writes
every page light and dark, of a run that is over its report, 1440 and 400 pixels wide; looking at them is up to you.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from browser import BROWSERS, Page, find_browser, opened_tab, running_browser
from planted_control import plant_seat, serving

from myxa.launch.control.client import ControlClient, ControlNote
from myxa.launch.views.report import write_report

PAGES = ("overview", "learning", "speed", "metrics", "samples", "time", "knobs", "events", "config")
LOOKS = (("light", 1440), ("dark", 1440), ("light", 400), ("dark", 400))


async def pictures(page: Page, url: str, out: Path, names: tuple[str, ...]) -> None:
    """`names`: of the dashboard's pages; of a report one that is no page."""
    for scheme, width in LOOKS:
        for name in names:
            await page.size(width, 900, is_dark=scheme == "dark")
            await page.goto(f"{url}#{name}" if name in PAGES else url)
            await asyncio.sleep(1.5)
            wide = await page.run("document.documentElement.scrollWidth > innerWidth")
            path = out / f"{name}-{scheme}-{width}.png"
            await page.picture(path)
            print(path, "IS WIDER THAN THE WINDOW" if wide else "")
    for line in page.wrong:
        print(f"wrong: {line}")


async def look(options: argparse.Namespace, browser: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        page = await stack.enter_async_context(opened_tab(stack.enter_context(running_browser(browser))))
        if options.run is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            note = await stack.enter_async_context(serving(plant_seat(Path(folder))))
            run_dir = Path(note.run_dir)
        else:
            run_dir = options.run
        report = write_report(run_dir, options.out / "report.html").resolve()
        await pictures(page, report.as_uri(), options.out, ("report",))
        if (note := ControlNote.load(run_dir)) is None:
            return
        url = (await asyncio.to_thread(ControlClient(note).ask, "dashboard", operate=True))["url"]
        await page.goto(url)
        await pictures(page, url.partition("?")[0], options.out, options.pages or PAGES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "myxa-pages")
    parser.add_argument("--pages", nargs="*", choices=PAGES)
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed")
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(look(options, browser))
    return 0


if __name__ == "__main__":
    sys.exit(main())
