"""A run file may name things of the newest run by `runs/latest`, which moves on as soon as the next run starts."""

from __future__ import annotations

from pathlib import Path

from myxa.core.config import load_config


def test_latest_means_the_run_that_it_pointed_at(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in ("first", "second"):
        (runs / name / "checkpoints").mkdir(parents=True)
    link = runs / "latest"
    link.symlink_to("first")
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npath = "latest"\n[data]\ntrain = "runs/latest/data.jsonl"\n'
        '[trainer]\nresume = "runs/latest/checkpoints"\n'
    )
    config = load_config([file], [])
    link.unlink()
    link.symlink_to("second")
    assert config.trainer.resume == str(runs.resolve() / "first" / "checkpoints")
    assert str(runs.resolve() / "first" / "data.jsonl") in str(config.data.train)
    assert config.model.path == str(tmp_path / "latest")
