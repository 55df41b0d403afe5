"""Commands that look at runs: `ps`, `top`, `dashboard`, `why`, `report`, `mem`; at what they wrote, also when they are
over: `ls`, `compare`, `samples`, and `dump`, which writes groups with their tokens into a file."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import LaunchError, MyxaError
from .. import verbs
from ..control.client import ControlClient, ControlNote, find_run
from ..memory_part import size_text
from .parser import JSON, RUN, at_least, command, flag, folder_of, show, table, verb_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ...core.device_memory import DeviceView
    from ..views.compare import ComparedMetric
    from ..views.run_view import RunView

LOOK_EVERY_S = 2.0
LOOK_S = 6.0
"""How long one look may take."""
COLUMNS = ("actor", "state", "pid", "node", "host", "attempt", "epoch", "up", "memory", "doing")


def _ps_from_files(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    import msgspec

    from ..views.run_files import load_run
    from ..views.run_view import run_view_of_files

    return msgspec.to_builtins(run_view_of_files(load_run(folder)).actors)


def _ps_page(rows: list[dict[str, Any]]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from ..views.numbers import duration

    cells = [
        (
            row["name"], row["state"], row["pid"] or "",
            *((row["node"], row["host"], row["attempt"]) if row["pid"] or row["host"] else ("", "", "")),
            row["epoch"] or "",
            duration(row["uptime_s"]) if row["uptime_s"] else "",
            size_text(row["memory_bytes"]) if row["memory_bytes"] else "", row["doing"],
        )
        for row in rows
    ]  # fmt: skip
    notes = [Text(f"{row['name']}: {row['note']}") for row in rows if row.get("note")]
    return Group(table(COLUMNS, cells, right=("pid", "node", "attempt", "epoch", "up", "memory")), *notes)


@command(
    "top", "the run in a terminal, as `myxa up` shows it, until Ctrl-C", RUN,
    description="Queues, staleness, engines, actors and newest changes of a live run; lines where there is no "
    "terminal.",
)  # fmt: skip
def top(options: argparse.Namespace) -> int:
    from ..views.live import LiveView
    from ..views.run_view import notice_text, title_text

    run = WatchedRun(find_run(options.run_path))
    with LiveView() as screen:
        while not (view := run.look()).has_ended:
            screen.update(view)
            threading.Event().wait(LOOK_EVERY_S)
    screen.say(f"{title_text(view)}\n{notice_text(view)}")
    return 0


class WatchedRun:
    """One run as `top` sees it, look after look, also while it fails or ends."""

    def __init__(self, note: ControlNote) -> None:
        from ..views.run_files import RunFiles

        self._note = note
        self._past = RunFiles(Path(note.run_dir))
        self._last: RunView | None = None

    def look(self) -> RunView:
        """Never raises for the run: one that does not answer gives its last view and says so."""
        import msgspec

        from ..views.run_view import RunView, carried_over, outcome, with_past

        self._past.read()
        try:
            answer = ControlClient(self._note).ask("status", timeout_s=LOOK_S, whole=True)
            view = with_past(msgspec.convert(answer, RunView), self._past)
        except (MyxaError, OSError, ValueError) as error:  # also a socket that breaks, or an answer of another version
            now_s, trouble = time.time(), str(error)
            last = self._last or RunView(now_wall_s=now_s, started_wall_s=now_s, run_dir=self._note.run_dir)
            if has_ended := not self._note.is_live:
                self._past.read(is_over=True)
                how = outcome(self._past)
                trouble = how.text if how.level != "open" else ""
            return msgspec.structs.replace(last, has_ended=has_ended, troubles=(trouble,) if trouble else ())
        self._last = carried_over(view, self._last or view)
        return self._last


def _dashboard_from_files(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    from ..views.report import write_report

    if options.operate:
        raise LaunchError(f"the run in {folder} is over", remedy="leave --operate out: its report is written")
    return {"report": str(write_report(folder))}


def _dashboard_page(answer: dict[str, Any]) -> str:
    if "report" in answer:
        return answer["report"]
    can = "look, and change the run" if answer["operate"] else "look"
    return f"{answer['url']}\nWith this URL anyone may {can}, until the run ends."


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
    from ..views.why import Reason, describe_rollout

    found = msgspec.convert(reason, Reason)
    parts: list[RenderableType] = [Text(found.sentence)]
    if found.remedy:
        parts.append(Text(f"to try: {found.remedy}", style="bold"))
    if found.rollouts:
        spent = ", ".join(
            f"{'wait for the engine' if name == 'engine' else name} {share * 100:.0f} %"
            for name, share in found.rollouts.items()
            if share >= 0.005
        )
        parts.append(Text(f"time of rollouts: {spent}"))
    rows = [(name, *(_percent(kinds, kind) for kind in ACTIVITY_KINDS)) for name, kinds in found.shares.items()]
    parts += [Text(""), table(("actor", *ACTIVITY_KINDS), rows, right=ACTIVITY_KINDS)]
    parts += [Text("\nrollouts that wait longest")] if found.under_way else []
    parts += [Text(describe_rollout(one)) for one in found.under_way]
    return Group(*parts)


def _percent(kinds: dict[str, float], kind: str) -> str:
    share = kinds.get(kind, 0.0)
    return f"{share * 100:.0f} %" if share >= 0.005 else ("" if kinds else "?")


@command(
    "report", "write report.html of a run",
    flag("folder", type=Path, nargs="?", metavar="RUN", help="run directory; the same as --run"), RUN,
    flag("--out", type=Path, default=None, metavar="FILE", help="write there (RUN/report.html)"), JSON,
)  # fmt: skip
def report(options: argparse.Namespace) -> int:
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
DASHBOARD = verb_command(
    verbs.DASHBOARD, _dashboard_page, from_files=_dashboard_from_files,
    description="The run serves a dashboard on 127.0.0.1 until it ends. The URL that is printed holds a secret: "
    "everyone who has it may look. Of an ended run its report is written.",
)  # fmt: skip
WHY = verb_command(verbs.WHY, _why_page, from_files=_why_from_files)
MEM = verb_command(verbs.MEM, memory_page)


# -- what runs wrote ---------------------------------------------------------------------------------------------------


@command(
    "ls", "the runs of a folder: state, step, reward",
    flag("folder", type=Path, nargs="?", default=Path("runs"), metavar="FOLDER", help="folder of runs (%(default)s)"),
    JSON,
)  # fmt: skip
def ls(options: argparse.Namespace) -> int:
    from ..views.compare import runs_of

    show(options, [asdict(run) for run in runs_of(options.folder)], _ls_page)
    return 0


def _ls_page(runs: list[dict[str, Any]]) -> RenderableType | str:
    from ..views.numbers import duration, short

    if not runs:
        return "there is no run in this folder"
    now_s = time.time()
    cells = [
        (run["name"], run["state"], run["step"], short(run["reward"]), short(run["eval_reward"]),
         f"{duration(max(0.0, now_s - run['started_wall_s']))} ago") for run in runs
    ]  # fmt: skip
    return table(("run", "state", "step", "reward", "held-out", "started"), cells, right=("step", "reward", "held-out"))


@command(
    "compare", "last values and curves of several runs, side by side",
    flag("folders", type=Path, nargs="+", metavar="RUN", help="run directory; two or more"),
    flag("--metric", action="append", default=[], metavar="PATTERN", dest="metrics",
         help="such as 'reward/*'; may be given several times"),
    flag("--html", type=Path, default=None, metavar="FILE", help="write a page with charts"), JSON,
    description="Without --metric: reward, evaluation, loss, entropy, lag, lengths, speed. The page of --html has all "
    "metrics and needs no network.",
)  # fmt: skip
def compare(options: argparse.Namespace) -> int:
    from ..views.compare import compared, load_runs

    runs = load_runs(options.folders)
    if options.html is not None:
        from ..views.report import write_page

        page = write_page(runs, options.html)
        show(options, {"report": str(page)}, lambda facts: facts["report"])
        return 0
    names, metrics = [run.run_dir.name for run in runs], compared(runs, options.metrics)
    facts = {
        "runs": [str(run.run_dir) for run in runs],
        "metrics": [{"metric": metric.metric, "last": metric.last} for metric in metrics],
    }
    show(options, facts, lambda _: _compare_page(names, metrics))
    return 0


def _compare_page(names: list[str], metrics: list[ComparedMetric]) -> RenderableType:
    from rich.console import Console

    from ..views.numbers import clean, short, sparkline

    console = Console()
    width = max(6, min(24, (console.width - 36) // len(names) - 12))
    rows: list[tuple[str, ...]] = []
    for metric in metrics:
        lines = (sparkline([*curve.values()], width) for curve in metric.curves)
        cells = (f"{short(last):>8}  {line}" for last, line in zip(metric.last, lines, strict=True))
        rows.append((clean(metric.metric), *cells))
    return table(("metric", *(clean(name) for name in names)), rows)


@command(
    "dump", "write finished groups with their tokens into a file",
    flag("file", type=Path, nargs="?", default=None, metavar="FILE",
         help="a new file (groups.sqlite in the run directory)"), RUN, JSON,
    description="All finished groups of a run, live or ended, whose tokens its ledger has: those that are not trained "
    "yet, and those that checkpoints have not deleted, in the order of training.",
)  # fmt: skip
def dump(options: argparse.Namespace) -> int:
    """From the ledger itself, so it works after the run, too."""
    from ...actors.ledger.file import LEDGER, dump_groups

    folder = folder_of(options)
    path: Path = options.file or folder / "groups.sqlite"
    facts = {"path": str(path), "num_groups": dump_groups(folder / LEDGER, path)}
    show(options, facts, lambda facts: f"{facts['num_groups']} groups in {facts['path']}")
    return 0


@command(
    "samples", "prompt, answers, rewards: of the newest groups, or of a step",
    flag("num_groups", nargs="?", type=at_least(1), default=4, metavar="N", help="how many (4)"),
    flag("--step", type=at_least(0), default=-1, metavar="S", help="of this step (any)"),
    flag("--eval", nargs="?", const="", default=None, metavar="SET",
         help="answers to held-out prompts, of one set of [eval.sets] or of all"), RUN, JSON,
    description="What samples.jsonl kept of each step, of a run that is live or has ended.",
)  # fmt: skip
def samples(options: argparse.Namespace) -> int:
    from ..views.run_files import SampleQuery, read_samples

    query = SampleQuery(step=options.step, held_out=options.eval is not None, eval_set=options.eval or "")
    asked = f" of set {options.eval!r}" * bool(options.eval) + f" of step {options.step}" * (options.step >= 0)
    groups = read_samples(folder_of(options), query, options.num_groups)
    show(options, {"groups": groups}, lambda facts: _samples_page(facts["groups"], asked))
    return 0


def _samples_page(groups: list[dict[str, Any]], asked: str) -> RenderableType:
    from rich.text import Text

    from ..views.conversation import group_lines

    lines = [line for group in groups for line in group_lines(group)]
    return Text("\n".join(lines) or f"samples.jsonl has no group{asked}: it keeps monitor.samples_per_step a step")
