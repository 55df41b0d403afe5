"""What `myxa top` shows, as rows of plain text. Pure: a RunView or the answer of a verb in, cells out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ...core.activity import ACTIVITY_KINDS
from ...core.knobs import AuditRecord
from ..views.changes import changes_of, clock_text, value_text
from ..views.live_state import LiveState, clean, name_order
from ..views.numbers import duration, percent, short, training_reward
from ..views.run_view import ActorFacts, RunView

LETTERS: Mapping[str, str] = dict(zip(ACTIVITY_KINDS, "█▓▒░◇▫▪·", strict=True))
LETTERS_ASCII: Mapping[str, str] = dict(zip(ACTIVITY_KINDS, "#dwcmep.", strict=True))
"""One letter a kind of time, so that bars can be read without colours."""

_GOOD = ("up", "")
_STATE_SIGNS = {
    "up": "+",
    "starting": "~",
    "hung": "!",
    "backing-off": "!",
    "failed": "x",
    "ending": "~",
    "exited": "x",
}


def done_words(verb: str, answer: object) -> str:
    """`pause: rests at 523`."""
    facts = cast("dict[str, object]", answer) if isinstance(answer, dict) else {}
    text = ", ".join(f"{name.replace('_', ' ')} {value_text(value)}" for name, value in facts.items())
    return f"{verb}: {clean(text) or 'done'}"


HISTORY_COLUMNS = ("no.", "time", "step", "what", "who", "result", "reason")


def history_rows(records: Sequence[AuditRecord]) -> list[tuple[str, ...]]:
    """Newest first."""
    rows = [
        (
            str(change.number),
            clock_text(change.wall_s),
            str(change.step) if change.step >= 0 else "",
            clean(change.what),
            clean(change.who),
            clean(change.result + (f": {change.detail}" if change.detail and not change.is_done else "")),
            clean(change.reason),
        )
        for change in changes_of(records)
    ]
    return rows[::-1]


ENGINE_COLUMNS = ("engine", "at", "lag", "runs", "waits", "tok/s")


def engine_rows(live: LiveState) -> list[tuple[str, ...]]:
    """Engines with the weights they serve and their load."""
    if live.status is None:
        return []
    return [
        (
            clean(engine.rollout),
            f"v{engine.version}",
            str(max(0, live.version - engine.version)),
            str(engine.running),
            str(engine.waiting),
            "drains" if engine.draining else short(live.snapshot.get(engine.rollout, {}).get("rollout/tokens_per_s")),
        )
        for engine in sorted(live.status.engines, key=lambda engine: name_order(engine.rollout))
    ]


def queue_rows(live: LiveState) -> list[tuple[str, int, int]]:
    """(label, count, out of): the buffer's states that hold groups, and its slots. Groups that are done come last."""
    stats = live.buffer
    if stats is None:
        return []
    names = {clean(name).lower(): count for name, count in stats.states.items()}
    living = {name: count for name, count in names.items() if name not in _DONE}
    largest = max([*living.values(), stats.slots_total, 1])
    rows = [("slots", stats.slots_used, stats.slots_total)]
    return rows + [(name, count, largest) for name, count in living.items() if count]


_DONE = ("trained", "durable", "dropped")


def done_text(live: LiveState) -> str:
    """`drawn 96   trained 80   dropped 3 (zero_variance 3)`."""
    stats = live.buffer
    if stats is None:
        return ""
    dropped = {clean(reason): count for reason, count in stats.dropped.items() if count}
    reasons = f" ({', '.join(f'{reason} {count}' for reason, count in dropped.items())})" if dropped else ""
    return f"drawn {stats.drawn}   trained {stats.trained}   dropped {sum(dropped.values())}{reasons}"


def lag_rows(live: LiveState) -> list[tuple[int, int, bool]]:
    """(lag, groups of the newest step, whether the bound allows it), every lag up to the bound."""
    prefix, newest = "lag_hist/", live.metrics.get("lag/max", -1.0)
    counts = {
        int(name.removeprefix(prefix)): round(value)
        for name, value in live.metrics.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    }
    counts = {lag: count for lag, count in counts.items() if lag <= newest}  # the others are of an older step
    bound = live.buffer.max_staleness if live.buffer is not None else max(counts, default=-1)
    last = min(max([bound, *counts]), _MAX_LAG)
    return [(lag, counts.get(lag, 0), lag <= bound) for lag in range(last + 1)]


_MAX_LAG = 12


def lag_text(live: LiveState) -> str:
    """`mean 0.4   max 2   bound 4 (pace)`."""
    parts = [f"{label} {short(live.metrics[name])}" for label, name in _LAGS if name in live.metrics]
    if live.buffer is not None:
        parts.append(f"bound {live.buffer.max_staleness} ({clean(live.buffer.policy)})")
    return "   ".join(parts)


_LAGS = (("mean", "lag/mean"), ("max", "lag/max"))


def bar(kinds: Mapping[str, float], width: int, *, is_ascii: bool = False) -> list[tuple[str, str]]:
    """[(letters, kind)] of a stacked bar of exactly `width` letters, blanks at its end included."""
    letters = LETTERS_ASCII if is_ascii else LETTERS
    filled, exact = 0, 0.0
    parts: list[tuple[str, str]] = []
    for kind in ACTIVITY_KINDS:
        exact += kinds.get(kind, 0.0) * width
        num = max(0, min(round(exact), width) - filled)
        filled += num
        if num:
            parts.append((letters[kind] * num, kind))
    return [*parts, (" " * (width - filled), "")]


def gauge(count: int, total: int, width: int, *, is_ascii: bool = False) -> str:
    """A bar of `width` letters; anything above 0 shows at least one."""
    num = 0 if count <= 0 or total <= 0 else max(1, min(width, round(count / total * width)))
    return ("#" if is_ascii else "█") * num + ("." if is_ascii else "·") * (width - num)


def main_kind(kinds: Mapping[str, float]) -> str:
    """`compute 62 %`: what takes most of its time."""
    top = max(ACTIVITY_KINDS, key=lambda kind: kinds.get(kind, 0.0))
    return f"{top} {percent(kinds[top])}" if kinds.get(top) else ""


def state_sign(actor: ActorFacts) -> str:
    """One letter for its process: + up, ~ on its way, ! in trouble, x gone, ? unknown."""
    return _STATE_SIGNS.get(actor.state, "?")


def is_well(actor: ActorFacts) -> bool:
    """Whether its process is up, or its state is unknown."""
    return actor.state in _GOOD


def node_label(node: int, actors: Sequence[ActorFacts]) -> str:
    """`node 0  (host)`."""
    host = next((actor.host for actor in actors if actor.host), "")
    return f"node {node}" + (f"  {clean(host)}" if host else "")


def title_text(view: RunView) -> str:
    """`sort-1  running  step 12 of 200  reward 0.82  4 min 05 s`."""
    live = view.live
    name = clean(live.status.name) if live.status else view.run_dir.rpartition("/")[2]
    goal = f" of {live.status.num_steps}" if live.status and live.status.num_steps > 0 else ""
    phase = "ended" if view.has_ended and live.phase not in ("finished", "failed") else live.phase
    parts = [name or "?", phase, f"step {live.version}{goal}"]
    if (reward := live.metrics.get(training_reward(live.metrics))) is not None:
        parts.append(f"reward {short(reward)}")
    parts.append(duration(max(0.0, live.now_wall_s - live.started_wall_s)))
    return "  ".join(parts)


def notice_text(view: RunView) -> str:
    """The line that must not be missed: paused, ended, silent, only a reader; empty when all is well."""
    live = view.live
    if view.has_ended:
        reason = (live.status.error or live.status.reason) if live.status else ""
        why = clean(reason or next(iter(view.troubles), ""))
        return f"the run has ended{f': {why}' if why else ''} -- this is how it was last seen"
    if view.silent_s > 0:
        return f"no answer for {duration(view.silent_s)}: {clean('; '.join(view.troubles))}"
    parts: list[str] = []
    if live.status is not None and live.status.paused:
        parts.append(f"paused: {clean(live.status.paused)}")
    if live.buffer is not None and live.buffer.complaint:
        parts.append(clean(live.buffer.complaint))
    if view.reader_only:
        parts.append("read-only: knobs can be seen, not turned")
    parts += [clean(trouble) for trouble in view.troubles]
    return "; ".join(parts)


def actor_lines(view: RunView, name: str) -> list[tuple[str, str]]:
    """(label, text) of one actor: its process, its time, its own newest metrics."""
    actor = next((actor for actor in view.actors if actor.name == name), None)
    if actor is None:
        return [("actor", f"{name} is not in the run any more")]
    place = f"pid {actor.pid or '?'}, node {actor.node} {actor.host}, attempt {actor.attempt}"
    process = f"{actor.state or 'state unknown'}, {place}"
    lines = [("actor", name), ("process", clean(process))]
    age_s = view.live.snapshot.get("age_s", {}).get(name)
    if age_s is not None:
        lines.append(("heard", f"{duration(age_s)} ago"))
    shares = view.live.shares().get(name, {})
    parts = sorted(((share, kind) for kind, share in shares.items() if share >= 0.005), reverse=True)
    lines += [
        ("time" if not index else "", f"{percent(share):>5}  {clean(kind)}")
        for index, (share, kind) in enumerate(parts[:10])
    ]
    values = view.live.snapshot.get(name, {})
    lines += [
        ("metrics" if not index else "", f"{short(value):>9}  {clean(key)}")
        for index, (key, value) in enumerate(sorted(values.items())[:60])
    ]
    return lines


_KEYS = {
    "knobs": "enter turn the knob  up/down choose",
    "history": "up/down choose",
    "log": "f hold or follow  up/down actor  space scroll",
    "stack": "r ask again  up/down actor  space scroll",
}


def help_text(page: str) -> str:
    """The line of keys, for a page."""
    return f"q quit  1-6 pages  {_KEYS.get(page, 'up/down actor  space scroll')}  t tree  ? help"


HELP = """\
Before an actor: + its process is up, ~ on its way, ! in trouble, x gone, ? unknown.
Bars: where its last minute went (the letters are explained below the bars of page 1).
Before a knob: * it differs from the run file. Enter on a knob turns it.
1 run  2 actor  3 knobs  4 history  5 log  6 stack
r refresh  t tree  p pause or resume the run  q quit"""


_HEADS = ("actor", "name", "target")
_BODIES = ("lines", "text", "log", "stack", "frames", "threads", "tail")
_MAX_LINES = 2000


def log_text(answer: object) -> str:
    """Lines of a log, oldest first, without control characters."""
    return _joined(answer) or "the log is empty"


def stack_text(answer: object) -> str:
    """Stacks of an actor's threads."""
    return _joined(answer) or "the stack is empty"


def _joined(answer: object) -> str:
    lines = [_plain(line) for part in _lines(answer) for line in part.splitlines()]
    return "\n".join(lines[-_MAX_LINES:])


def _lines(answer: object) -> Iterator[str]:
    """A text, a list of texts, or records that hold them under one of the usual names."""
    if isinstance(answer, str):
        yield answer
    elif isinstance(answer, list | tuple):
        for part in cast("list[object]", answer):
            yield from _lines(part)
    elif isinstance(answer, dict):
        record = cast("dict[str, Any]", answer)
        bodies = [record[key] for key in _BODIES if record.get(key)]
        if bodies and (head := next((str(record[key]) for key in _HEADS if record.get(key)), "")):
            yield f"-- {head}"
        for body in bodies or [value for value in record.values() if isinstance(value, list | dict)]:
            yield from _lines(body)


def _plain(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line.replace("\t", "    "))
