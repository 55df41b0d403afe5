"""What sinks are told of the run file: everything that says how the run learns, nothing that may be a secret."""

from __future__ import annotations

from myxa.core.config import RunConfig
from myxa.launch.composition.shown_settings import shown_settings


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
            "engine": {"attach": ["http://me:s3cret@host:1"], "key_env": "FLEET"},
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
    assert (shown["engine.attach"], shown["optimizer.lr"], shown["data.shuffle"]) == ("http://host:1", 1e-4, True)
    assert all(isinstance(value, str | int | float | bool) for value in shown.values())
