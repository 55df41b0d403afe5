"""A picture of the run and its history as JSON types for the page. Pure; all text is plain, the page escapes it.

Knows pictures, histories, the rows that `myxa top` shows. Must not know sockets or HTML.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...core.activity import ACTIVITY_KINDS
from ..tui import rows
from ..views.advice import facts_of_file, num_cores, what_to_try
from ..views.bottleneck import NEWEST, Filtered, judge
from ..views.changes import value_text
from ..views.live_state import clean
from ..views.numbers import duration, percent, short, training_reward
from ..views.picture import ActorFacts, RunView, name_order
from .charts import all_charts, marks, time_charts
from .history import History

_MAX_KINDS = 30


def state_table(picture: RunView, history: History, *, may_operate: bool) -> dict[str, Any]:
    """What changes every second."""
    if not picture.actors:
        picture = _from_files(picture, history)
    live = picture.live
    return {
        "name": (live.status.name if live.status else "") or picture.run_dir.rpartition("/")[2],
        "runDir": picture.run_dir,
        "phase": "ended" if picture.has_ended and live.phase not in ("finished", "failed") else live.phase,
        "title": rows.title_text(picture),
        "notice": rows.notice_text(replace(picture, reader_only=False)),  # of a page that only shows, all know it
        "hasEnded": picture.has_ended,
        "isSilent": picture.silent_s > 0,
        "mayOperate": may_operate and not picture.has_ended,
        "why": clean(picture.why),
        "remedy": clean(picture.remedy),
        "tiles": _tiles(picture, history),
        "kinds": ACTIVITY_KINDS,
        "actors": _actors(picture),
        "queues": [{"label": label, "count": count, "total": total} for label, count, total in rows.queue_rows(live)],
        "done": rows.done_text(live),
        "lags": _lags(picture, history),
        "engines": {"columns": rows.ENGINE_COLUMNS, "rows": rows.engine_rows(live)},
        "knobs": _knobs(picture),
    }


def _from_files(picture: RunView, history: History) -> RunView:
    """Of a run that nobody answers for any more: its actors and what held it back, over the whole run."""
    shares = {name: bins.total() for name, bins in history.shares.items()}
    names = sorted(shares, key=name_order)
    snapshot = {f"time/{name}": kinds for name, kinds in shares.items()}
    newest = {name: series.points()[-1][1] for name, series in history.by_time.items() if name.startswith(NEWEST)}
    verdict = judge(shares, filtered=Filtered.of({"buffer": newest}))
    facts = facts_of_file(history.config, sum(name.startswith("rollout/") for name in shares), num_cores())
    return replace(
        picture,
        live=replace(picture.live, snapshot=snapshot),
        actors=tuple(ActorFacts(name, name.partition("/")[0]) for name in names),
        why=verdict.sentence,
        remedy=what_to_try(verdict, facts),
    )


def history_table(history: History) -> dict[str, Any]:
    """What grows: charts, time, changes, events."""
    return {
        "startWall": history.start_wall_s or 0.0,
        "charts": all_charts(history),
        "time": time_charts(history),
        "changes": marks(history),
        "events": [
            {"wall_s": event.wall_s, "source": event.source, "kind": event.kind, "text": event.text}
            for event in history.events
        ],
        "eventCounts": history.event_counts.most_common(_MAX_KINDS),
        "numBad": history.num_bad,
    }


def _tiles(picture: RunView, history: History) -> list[dict[str, str]]:
    """The figures that are asked for first; of a run that is over from its files."""
    live = picture.live
    status = live.status
    version = live.version if status else (history.step_range or (0, 0))[1]
    goal = f"of {status.num_steps}" if status and status.num_steps > 0 else ""
    found = [("step", str(version), goal)]
    if status is not None:
        found.append(("running for", duration(max(0.0, live.now_wall_s - live.started_wall_s)), ""))
    found += [
        ("training reward", *_reward(picture, history)),
        ("right", _share(picture, history, "reward/pass_rate"), "of the answers"),
        ("all right / wrong", _all_or_none(picture, history), "of the groups"),
        ("held-out reward", short(_newest(picture, history, "eval/reward")), ""),
        ("loss", short(_newest(picture, history, "train/loss")), ""),
        ("generated", short(live.rate("rollout/tokens_per_s")), "tokens/s"),
        ("trained", short(live.rate("train/tokens_per_s")), "tokens/s"),
        ("largest lag", short(_newest(picture, history, "lag/max")), _bound(picture)),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in found if value != "-"]


def _newest(picture: RunView, history: History, name: str) -> float | None:
    if name in picture.live.metrics:
        return picture.live.metrics[name]
    series = history.by_step.get(name)
    points = series.points() if series is not None else []
    return points[-1][1] if points else None


def _reward(picture: RunView, history: History) -> tuple[str, str]:
    """Of all finished groups, with its deviation."""
    name = training_reward({*picture.live.metrics, *history.by_step})
    std = picture.live.metrics.get(name.replace("mean", "std"))
    spread = f"± {short(std)}" if std is not None and math.isfinite(std) else ""
    return short(_newest(picture, history, name)), spread


def _share(picture: RunView, history: History, name: str) -> str:
    value = _newest(picture, history, name)
    return "-" if value is None else percent(value)


def _all_or_none(picture: RunView, history: History) -> str:
    shares = [_share(picture, history, name) for name in ("reward/all_right", "reward/all_wrong")]
    return "-" if "-" in shares else " / ".join(shares)


def _bound(picture: RunView) -> str:
    return f"bound {picture.live.buffer.max_staleness}" if picture.live.buffer else ""


def _actors(picture: RunView) -> list[dict[str, Any]]:
    shares = picture.live.shares()
    return [
        {
            "name": actor.name,
            "node": actor.node,
            "host": actor.host,
            "state": actor.state,
            "isWell": rows.is_well(actor),
            "pid": actor.pid,
            "shares": [round(shares.get(actor.name, {}).get(kind, 0.0), 4) for kind in ACTIVITY_KINDS],
            "parts": [
                f"{kind} {percent(share)}"
                for kind, share in sorted(shares.get(actor.name, {}).items(), key=lambda item: -item[1])
                if share >= 0.01
            ][:6],
        }
        for actor in picture.actors
    ]


def _lags(picture: RunView, history: History) -> dict[str, Any]:
    """Groups of the newest steps by lag, every lag up to the bound."""
    counts = history.lag_counts()
    bound = picture.live.buffer.max_staleness if picture.live.buffer else max(counts, default=-1)
    last = min(max([bound, *counts], default=-1), 40)
    return {
        "text": rows.lag_text(picture.live),
        "numSteps": len(history.lags),
        "bars": [{"lag": lag, "count": counts.get(lag, 0.0), "isAllowed": lag <= bound} for lag in range(last + 1)],
    }


def _knobs(picture: RunView) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "kind": row.tunable.kind,
            "choices": row.tunable.choices,
            "value": row.value,
            "raw": value_text(row.values[0]),
            "unit": row.tunable.unit,
            "pending": "" if row.pending is None else value_text(row.pending),
            "reverts": row.reverts,
            "takes": row.tunable.range_text(),
            "boundary": row.tunable.boundary,
            "owner": rows.owners_text(row.owners),
            "first": value_text(row.first),
            "isChanged": row.is_changed,
            "help": row.tunable.help,
        }
        for row in rows.knob_rows(picture.knobs)
    ]
