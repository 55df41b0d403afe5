"""Weights & Biases: one W&B run for all actors of this run. Offline unless said otherwise by `mode` or WANDB_MODE.

    [monitor]
    sinks = ["wandb"]
    [monitor.options.wandb]
    project = "sorting"
    mode = "offline"         # `wandb sync <run>/wandb/offline-run-*` uploads it later

wandb is imported in `open` only: it is an optional extra, large, and starts its own process. It gets metrics, and
the run file as hyper-parameters, without what looks like a secret; trace and events stay in the run directory.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ...core.errors import ConfigError
from ...core.messages import Telemetry
from ...core.sink import SinkContext
from .registry import curves_of

RUN_ID_FILE = "wandb.run_id"
"""In the run directory: a restarted monitor continues the same W&B run."""

_STEP, _WALL = "step", "wall_s"
_MODES = ("", "online", "offline", "disabled")


class WandbSink:
    """Metrics by step."""

    name = "wandb"

    def __init__(
        self,
        project: str = "myxa",
        entity: str = "",
        group: str = "",
        tags: tuple[str, ...] | list[str] = (),
        mode: str = "",
    ) -> None:
        """`mode`: online, offline or disabled; empty: what WANDB_MODE says, offline without it."""
        if mode not in _MODES:
            raise ConfigError(f"monitor.options.wandb: mode = {mode!r}", remedy="take online, offline or disabled")
        self._settings = {"project": project, "entity": entity or None, "group": group or None, "tags": list(tags)}
        self._mode = mode
        self._run: Any = None
        self._step = 0

    def open(self, context: SinkContext) -> None:
        """Raises ImportError saying what to install when wandb is missing (the run continues without this sink)."""
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise ImportError(f"wandb is not installed ({error}) -- pip install 'myxa[wandb]'") from error
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False)
        mode = self._mode or _chosen_mode(wandb.setup().settings) or "offline"
        note = context.run_dir / RUN_ID_FILE
        known = note.read_text(encoding="utf-8").strip() if note.exists() else None
        self._run = wandb.init(
            id=known,
            resume="allow" if known else None,
            name=context.run_dir.name,
            dir=str(context.run_dir),
            mode=mode,
            settings=settings,
            reinit="create_new",
            **self._settings,
        )
        note.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.config.update(dict(context.settings), allow_val_change=True)
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        where = self._run.url if mode == "online" else self._run.dir
        context.emit("wandb-opened", f"W&B run {self._run.id} ({mode}): {where}")

    def write(self, bundle: Telemetry) -> None:
        """One row per metric point; gauges of a moment are put at the newest step."""
        for point in bundle.metrics:
            if values := curves_of(point):
                self._step = max(self._step, point.step)
                step = point.step if point.step >= 0 else self._step
                self._run.log({**values, _STEP: step, _WALL: point.wall_s})

    def flush(self) -> None:
        """Nothing to do: the library sends by itself."""

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
            import_module("wandb").teardown()


def _chosen_mode(settings: Any) -> str:
    """The mode that environment or settings file ask for; empty where it is only the library's default."""
    return str(settings.mode) if "mode" in settings.model_fields_set else ""
