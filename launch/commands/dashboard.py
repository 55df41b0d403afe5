"""`myxa dashboard`: the run in a browser, from a process of its own. Looking only, unless --operate is said."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ...core.errors import LaunchError
from .output import Verbs, add_run_flags

if TYPE_CHECKING:
    from ..tui.feed import Feed


def add(verbs: Verbs) -> None:
    """Add the command."""
    parser = verbs.add_parser(
        "dashboard",
        help="the run in a browser of this machine",
        description="Serves a dashboard of the run on 127.0.0.1 until Ctrl-C and prints its URL, which holds a secret: "
        "whoever has it may look. Of a run that is over it shows what its files hold.",
    )
    add_run_flags(parser)
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="port on 127.0.0.1 (any free one)")
    parser.add_argument("--operate", action="store_true", help="let whoever has the URL turn knobs, too")
    parser.set_defaults(run=_dashboard)


def _dashboard(options: argparse.Namespace) -> int:
    import asyncio  # commands start without it

    from ..tui.feed import Feed

    try:
        feed = Feed.of(options.run_path, only_view=not options.operate)
    except LaunchError:
        if options.run_path is None or not (options.run_path / "metrics.jsonl").is_file():
            raise
        feed = Feed.of_files(options.run_path)
    return asyncio.run(_serve(feed, options))


async def _serve(feed: Feed, options: argparse.Namespace) -> int:
    import asyncio

    from ..web.dashboard import Dashboard  # aiohttp is needed here only
    from ..web.guard import Guard

    dashboard = Dashboard(feed, Guard(may_operate=options.operate))
    async with dashboard.serving(options.port) as url:
        if options.json:
            print(json.dumps({"url": url, "run_dir": str(feed.run_dir), "operate": options.operate}), flush=True)
        else:
            can = "look, and turn knobs" if options.operate else "look"
            print(f"{url}\nWhoever has this URL may {can}. Ctrl-C ends it.", flush=True)
        await asyncio.Event().wait()
    return 0
