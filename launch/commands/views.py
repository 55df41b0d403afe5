"""Commands that look at a run: `ps`, `top`, `dashboard`, `why`, `report`, `mem`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import LaunchError
from ..control import verbs
from ..memory_part import size_text
from .parser import Command, Parser, add_json_flag, add_run_flags, folder_of, show, table, verb_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...core.device_memory import DeviceView
    from ..feed import Feed

LOOK_EVERY_S = 1.0
COLUMNS = ("actor", "state", "pid", "node", "host", "attempt", "epoch", "up", "memory", "doing")


def _ps_from_files(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    import msgspec

    from ..views.run_files import load_run
    from ..views.run_view import run_view_of_files

    del options
    return msgspec.to_builtins(run_view_of_files(load_run(folder)).actors)


def _ps_page(rows: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..views.numbers import duration

    cells = [
        (
            row["name"], row["state"], row["pid"] or "", row["node"], row["host"], row["attempt"], row["epoch"] or "",
            duration(row["uptime_s"]) if row["uptime_s"] else "",
            size_text(row["memory_bytes"]) if row["memory_bytes"] else "", row["doing"],
        )
        for row in rows
    ]  # fmt: skip
    notes = [Text(f"{row['name']}: {row['note']}") for row in rows if row.get("note")]
    return Group(table(COLUMNS, cells, right=("pid", "node", "attempt", "epoch", "up", "memory")), *notes)


def _add_top(parser: Parser) -> None:
    parser.add_argument("--run", type=Path, default=None, metavar="RUN", dest="run_path",
                        help="run directory (the only live run)")  # fmt: skip


def _top(options: argparse.Namespace) -> int:
    from ..feed import Feed
    from ..views.live import LiveView
    from ..views.run_view import notice_text, title_text

    feed = Feed.of(options.run_path)
    with LiveView() as screen:
        while not (view := feed.look()).has_ended:
            screen.update(view)
            feed.wait(LOOK_EVERY_S)
    screen.say(f"{title_text(view)}\n{notice_text(view)}")
    return 0


def _add_dashboard(parser: Parser) -> None:
    add_run_flags(parser)
    parser.add_argument("--port", type=int, default=0, metavar="PORT", help="port on 127.0.0.1 (any free one)")
    parser.add_argument("--operate", action="store_true", help="let everyone who has the URL change the run, too")


def _dashboard(options: argparse.Namespace) -> int:
    import asyncio  # commands start without it

    from ..feed import Feed

    try:
        feed = Feed.of(options.run_path)
    except LaunchError:
        if options.run_path is None or not (options.run_path / "metrics.jsonl").is_file():
            raise
        feed = Feed(options.run_path.resolve())
    return asyncio.run(_dashboard_serve(feed, options))


async def _dashboard_serve(feed: Feed, options: argparse.Namespace) -> int:
    import asyncio

    from ..web.dashboard import (
        Dashboard,  # aiohttp is needed here only
        DashboardGuard,
    )

    dashboard = Dashboard(feed, DashboardGuard(may_operate=options.operate))
    async with dashboard.serving(options.port) as url:
        if options.json:
            print(json.dumps({"url": url, "run_dir": str(feed.run_dir), "operate": options.operate}), flush=True)
        else:
            can = "look, and change the run" if options.operate else "look"
            print(f"{url}\nWhoever has this URL may {can}. Ctrl-C ends it.", flush=True)
        await asyncio.Event().wait()
    return 0


def _why_from_files(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Of a run that is over, over all of it."""
    import msgspec

    from ..views.run_files import load_run
    from ..views.why import explain_run

    return msgspec.to_builtins(explain_run(load_run(folder), options.target))


def _why_page(reason: dict[str, Any]) -> RenderableType:
    import msgspec
    from rich.console import Group
    from rich.text import Text

    from ...core.activity import ACTIVITY_KINDS
    from ..views.why import Reason, words_of

    found = msgspec.convert(reason, Reason)
    parts: list[RenderableType] = [Text(found.sentence)]
    if found.remedy:
        parts.append(Text(f"to try: {found.remedy}", style="bold"))
    if found.rollouts:
        spent = ", ".join(f"{name} {share * 100:.0f} %" for name, share in found.rollouts.items() if share >= 0.005)
        parts.append(Text(f"time of rollouts: {spent}"))
    parts += [Text(words_of(one)) for one in found.under_way]
    rows = [(name, *(_percent(kinds, kind) for kind in ACTIVITY_KINDS)) for name, kinds in sorted(found.shares.items())]
    parts += [Text(""), table(("actor", *ACTIVITY_KINDS), rows, right=ACTIVITY_KINDS)]
    return Group(*parts)


def _percent(kinds: dict[str, float], kind: str) -> str:
    share = kinds.get(kind, 0.0)
    return f"{share * 100:.0f} %" if share >= 0.005 else ("" if kinds else "?")


def _add_report(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, nargs="?", metavar="RUN",
                        help="run directory (the only live run, else the newest of this folder)")  # fmt: skip
    parser.add_argument("--run", type=Path, default=None, metavar="RUN", dest="run_path", help="the same")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help="write there (RUN/report.html)")
    add_json_flag(parser)


def _report(options: argparse.Namespace) -> int:
    from ..views.report import write_report  # templates are needed here only

    folder = options.folder or options.run_path or folder_of(options)
    page = write_report(folder, options.out)
    show(options, {"report": str(page)}, lambda facts: facts["report"])
    return 0


MAX_EVENTS = 20
PLACES = {
    "mapped_dirty": "on the device",
    "mapped_clean": "on the device, copy kept",
    "copy_out": "leaving",
    "host": "on the host",
    "discarded": "dropped",
    "copy_in": "coming back",
    "poisoned": "LOST",
}


def memory_page(facts: Any) -> RenderableType:
    import msgspec
    from rich.console import Group
    from rich.text import Text

    from ...core.device_memory import MemoryView

    view = msgspec.convert(facts, MemoryView)
    doing = f"switching: {view.switching}" if view.switching else "nothing is being switched"
    parts: list[RenderableType] = [Text(f"{view.manager}, epoch {view.epoch}: {doing}")]
    for device in view.devices:
        parts += [Text(""), *_device(device)]
    if events := view.timeline[-MAX_EVENTS:]:
        clocks = (datetime.fromtimestamp(event[0]).strftime("%H:%M:%S.%f")[:-3] for event in events)
        lines = [(clock, *event[1:]) for clock, event in zip(clocks, events, strict=True)]
        parts += [Text(f"\nthe last {len(events)} events"), table(("time", "device", "tenant", "event"), lines)]
    return Group(*parts)


def _device(device: DeviceView) -> Iterator[RenderableType]:
    """Parts of one tag that are in the same place are one row."""
    from rich.text import Text

    from ...core.device_memory import whole_of

    at = f" on node {device.node}" if device.node else ""
    line = f"{device.device}{at}: {size_text(device.capacity_bytes)}, free {size_text(device.free_bytes)}"
    more = f", unattributed {size_text(device.unattributed_bytes)}" if device.unattributed_bytes > 0 else ""
    yield Text(line + more)
    sizes: dict[tuple[str, ...], list[int]] = {}
    for tenant in device.tenants:
        who = f"{tenant.tenant} ({tenant.gang})", tenant.state
        for tag in tenant.tags:
            size = sizes.setdefault((*who, whole_of(tag.tag), PLACES[tag.backing], tag.policy), [0, 0])
            size[0] += tag.num_bytes
            size[1] += tag.host_bytes
    rows = [
        (*key[:3], size_text(size), *key[3:], size_text(host) if host else "") for key, (size, host) in sizes.items()
    ]
    yield table(
        ("tenant", "state", "tag", "size", "where", "policy", "on the host"), rows, right=("size", "on the host")
    )


PS = verb_command(verbs.PS, _ps_page, from_files=_ps_from_files)
TOP = Command(
    "top", "the run in a terminal, as `myxa up` shows it, until Ctrl-C", _top, _add_top,
    "Queues, staleness, engines, actors and newest changes of a live run; lines where there is no terminal.",
)  # fmt: skip
DASHBOARD_COMMAND = Command(
    "dashboard", "the run in a browser of this machine", _dashboard, _add_dashboard,
    "Serves a dashboard of the run on 127.0.0.1 until Ctrl-C and prints its URL, which holds a secret: everyone who "
    "has the URL may look. Of an ended run it shows what its files hold.",
)  # fmt: skip
WHY = verb_command(verbs.WHY, _why_page, from_files=_why_from_files)
MEM = verb_command(verbs.MEM, memory_page)
REPORT = Command("report", "write report.html of a run", _report, _add_report)
