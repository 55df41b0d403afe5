"""What sinks are told of the run file: everything that says how the run learns, nothing that may be a secret."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel

from myxa.core.config import RunConfig
from myxa.launch.program import shown_settings


def test_settings_are_plain_and_hold_no_secret() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "/m"},
            "data": {"train": ["a.jsonl", "b.jsonl"], "prompt_key": "question"},
            "rollout": {"stop_token_ids": [1, 2], "stop": ["###"]},
            "reward": {
                "fn": "judge.py:f",
                "args": {"api_key": "s3cret", "tolerance": 0.1, "deep": {"TOKEN": "s3cret"}},
            },
            "engine": {"attach": ["http://me:s3cret@host:1"]},
            "roles": {"rollout": {"kind": "sglang", "env": {"HOME": "s3cret"}}},
            "monitor": {"sinks": ["wandb"], "options": {"wandb": {"project": "s3cret"}}},
        }
    )
    shown = shown_settings(config)
    assert "s3cret" not in repr(shown)
    assert (shown["data.train"], shown["data.prompt_key"]) == ("a.jsonl, b.jsonl", "question")
    assert (shown["rollout.stop_token_ids"], shown["rollout.stop"]) == ("1, 2", "###")
    assert (shown["reward.args.api_key"], shown["reward.args.tolerance"]) == ("(hidden)", 0.1)
    assert shown["reward.args.deep.TOKEN"] == "(hidden)"
    assert (shown["engine.attach"], shown["optimizer.lr"], shown["data.shuffle"]) == ("(hidden)", 1e-4, True)
    assert all(isinstance(value, str | int | float | bool) for value in shown.values())


def free_tables(section: type[BaseModel], place: str) -> list[str]:
    """Paths of all tables whose keys are whatever somebody writes; named ones are called x."""
    found: list[str] = []
    for name, field in section.model_fields.items():
        path, kind = f"{place}{field.alias or name}", field.annotation
        if kind == dict[str, Any]:
            found.append(path)
            continue
        named = kind is not None and getattr(kind, "__origin__", None) is dict
        inner = get_args(kind)[1] if named else kind
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += free_tables(inner, f"{path}.x." if named else f"{path}.")
    return found


def test_secrets_are_hidden_in_every_table_whose_keys_are_not_ours() -> None:
    paths = [path for path in free_tables(RunConfig, "") if path != "monitor.options"]
    assert {"reward.functions.x.args", "rollout.workflow_args", "eval.sets.x.reward_args"} <= set(paths)
    raw: dict[str, Any] = {}
    for path in paths:
        level = raw
        for part in path.split("."):
            level = level.setdefault(part, {})
        level |= {"api_key": "s3cret", "judges": [{"api_key": "s3cret", "name": "b"}]}
    whole = RunConfig.model_validate({"model": {"path": "/m"}, "data": {"train": "a.jsonl"}}).model_dump(by_alias=True)

    class Shown(RunConfig, frozen=True):
        """As it is, whatever goes together."""

        def model_dump(self, **_: Any) -> dict[str, Any]:
            return merged(whole, raw)

    shown = shown_settings(Shown.model_construct())
    assert "s3cret" not in repr(shown)
    assert all(shown[f"{path}.api_key"] == "(hidden)" for path in paths)
    assert all(shown[f"{path}.judges.0.name"] == "b" for path in paths)


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return base | {
        key: merged(base.get(key) or {}, value) if isinstance(value, dict) else value for key, value in more.items()
    }
