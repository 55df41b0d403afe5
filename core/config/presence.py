"""Whether what a configuration names is there. Apart from loading, so that a run can be planned on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .root import RunConfig
from .source import parse_sources


def missing_paths(config: RunConfig) -> tuple[str, ...]:
    """One sentence per file or folder that the run will read and that does not exist on this machine."""
    return tuple(
        f"{key} = {path}: there is no such {kind}"
        for key, path, kind in _named_paths(config)
        if not (Path(path).is_dir() if kind == "folder" else Path(path).is_file())
    )


def _named_paths(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    yield "model.path", config.model.path, "folder"
    folders = (
        ("algo.ref_path", config.algo.ref_path),
        ("critic.path", config.critic.path),
        ("trainer.resume", config.trainer.resume),
        ("weights.served_folder", config.weights.served_folder),
    )
    yield from ((key, folder, "folder") for key, folder in folders if folder)
    for key, value in config.data_files():
        yield from ((key, source.path, "file") for source in parse_sources(value))
    code = (
        ("rollout.workflow", config.rollout.workflow),
        *config.reward.named_functions(),
        ("algo.group_filter", config.algo.group_filter),
        ("algo.sample_filter", config.algo.sample_filter),
        ("algo.reward_post_process", config.algo.reward_post_process),
        ("algo.advantage_fn", config.algo.advantage_fn),
        ("algo.weight_fn", config.algo.weight_fn),
        ("algo.loss_fn", config.algo.loss_fn),
        *config.eval.named_functions(),
    )
    for key, name in code:
        file, colon, _ = name.rpartition(":")
        if colon and file.endswith(".py"):
            yield key, file, "file"
    if "/" in config.engine.python:
        yield "engine.python", config.engine.python, "file"
    for name, role in config.roles.by_name():
        if "/" in role.python:
            yield f"roles.{name}.python", role.python, "file"
