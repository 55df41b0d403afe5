"""Prompts that are too long: refused, or left out at the start and counted (finding G)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_rows import opened, stored
from tests.data.token_layouts import plain

from myxa.actors.data import open_data
from myxa.core.config import RunConfig
from myxa.core.errors import DataError

LONG = {"prompt": "x " * 300, "label": "1"}
SHORT = {"prompt": "2+2", "label": "4"}
DROP = {"overlong": "drop", "max_prompt_tokens": 200, "apply_chat_template": False}


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "model"
    folder.mkdir()
    plain(folder)
    (folder / "config.json").write_text("{}")
    return {"path": str(folder)}


def test_g_over_long_prompts_are_dropped_at_the_start_and_counted(
    tmp_path: Path, model: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path, [SHORT, LONG, SHORT])
    dataset = opened(path, model=model, data=DROP)
    assert (len(dataset), dataset.num_overlong) == (2, 1)
    assert "t.jsonl:2: " in dataset.overlong_rows[0] and "data.max_prompt_tokens" in dataset.overlong_rows[0]
    assert [prompt.row for draw in range(2) if (prompt := dataset.prompt(draw))] == [0, 2]
    with caplog.at_level(logging.WARNING):
        open_data(RunConfig.model_validate({"model": model, "data": DROP | {"train": path}}))
    assert "1 of 3 rows" in caplog.text
    with pytest.raises(DataError, match=r"data\.train: no row is left, 2 are over-long; the first: .*t\.jsonl:1: "):
        opened(stored(tmp_path, [LONG, LONG]), model=model, data=DROP)


def test_g_over_long_prompts_are_refused_on_demand(tmp_path: Path, model: dict[str, Any]) -> None:
    path = stored(tmp_path, [SHORT, LONG])
    data = {"overlong": "refuse", "apply_chat_template": False}
    with pytest.raises(DataError, match=r"t\.jsonl:2: the prompt has .* the limit is 199 .* data\.overlong"):
        opened(path, model=model, data=data, engine={"context_length": 200}, rollout={"max_new_tokens": 20})
    assert len(opened(path, data={"apply_chat_template": False})) == 2
    with pytest.raises(ValueError, match="needs overlong"):
        opened(path, data={"max_prompt_tokens": 5})


def test_g_over_long_held_out_prompts_are_dropped_and_counted_or_refused(
    tmp_path: Path, model: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    held_out = tmp_path / "h.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in (LONG, SHORT, SHORT, LONG)))
    path, sections = stored(tmp_path, [SHORT]), {"model": model, "eval": {"data": str(held_out)}}
    with caplog.at_level(logging.WARNING):
        dataset = opened(path, data=DROP, **sections)
    assert [prompt.row for prompt in dataset.eval_prompts(9)] == [1, 2]
    assert (dataset.num_held_out(), dataset.num_overlong) == (2, 0)
    assert "eval.data: 2 of 4 rows" in caplog.text and "h.jsonl:4: " in caplog.text
    with pytest.raises(DataError, match=r"h\.jsonl:1: the prompt has .* data\.overlong"):
        opened(path, data=DROP | {"overlong": "refuse"}, **sections)
    sources = {"data": {"sources": {"a": {"path": path}}, **DROP}, **sections}
    assert open_data(RunConfig.model_validate(sources)).num_held_out() == 2
