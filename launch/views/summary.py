"""What is said when a run is over: how it ended, the curve, where the report is, what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ...core.messages import RunStatus
from .live_state import clean, dropped_text
from .numbers import duration, short
from .textplot import plot

_MAX_WIDTH = 72


@dataclass(frozen=True, slots=True)
class Curves:
    """What is drawn: step -> value. The loss is drawn when there is no reward (demonstrations alone)."""

    reward: Mapping[int, float] = field(default_factory=dict[int, float])
    eval_reward: Mapping[int, float] = field(default_factory=dict[int, float])
    loss: Mapping[int, float] = field(default_factory=dict[int, float])


def final_summary(
    console: Console,
    status: RunStatus,
    *,
    elapsed_s: float,
    run_dir: Path,
    report: Path | None,
    curves: Curves,
    next_steps: Sequence[str] = (),
    dropped: Mapping[str, int] | None = None,
) -> None:
    """Print the end of a run. `next_steps`: sentences or commands to try; `dropped`: reason -> groups left out."""
    colour = {"finished": "green", "failed": "red"}.get(status.phase, "yellow")
    goal = f" of {status.num_steps}" if status.num_steps > 0 else ""
    headline = f"{clean(status.name)}: {status.phase} after {status.version}{goal} steps, {duration(elapsed_s)}"
    console.print(Text(headline, style=f"bold {colour}"))
    for reason in (status.reason, status.error):
        if reason:
            console.print(Text(clean(reason)), soft_wrap=True)
    if dropped and any(dropped.values()):
        console.print(Text(f"groups left out: {dropped_text(dropped)}"), soft_wrap=True)
    if curves.reward or curves.eval_reward or not curves.loss:
        _print_curve(console, "reward", curves.reward, curves.eval_reward)
    else:
        _print_curve(console, "loss", curves.loss, {})
    console.print()
    _print_place(console, "report", report)
    _print_place(console, "run directory", run_dir)
    if next_steps:
        console.print(Text("try next", style="bold"))
        for step in next_steps:
            console.print(Text(f"  - {clean(step)}"), soft_wrap=True)


def _print_curve(console: Console, name: str, curve: Mapping[int, float], evaluations: Mapping[int, float]) -> None:
    width = min(_MAX_WIDTH, console.width - 12)
    is_ascii = not console.encoding.lower().startswith("utf")
    lines = plot(curve, evaluations, width=width, height=10, is_ascii=is_ascii)
    if not lines:
        return
    label = f"{name}: {_change(curve)}" if curve else name
    label += f"   o held-out: {_change(evaluations)}" if evaluations else ""
    console.print()
    console.print(Text(label))
    for line in lines:
        console.print(Text(line, no_wrap=True), crop=False)


def _change(curve: Mapping[int, float]) -> str:
    """First and last value; of a noisy curve the means of its first and last tenth."""
    values = [curve[step] for step in sorted(curve)]
    num = max(1, len(values) // 10)
    first, last = sum(values[:num]) / num, sum(values[-num:]) / num
    return f"{short(first)} -> {short(last)}"


def _print_place(console: Console, label: str, path: Path | None) -> None:
    if path is not None:
        console.print(Text.assemble((f"{label}: ", "bold"), str(path)), soft_wrap=True)
