"""The launcher tells of a layout that cannot cut the model, before any process starts and without importing torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from myxa.actors.models.tiny import make_tiny_model
from myxa.core.config import load_config
from myxa.core.errors import ConfigError
from myxa.launch.checks.all_checks import check_node
from myxa.launch.supervisor.placement import place

RUN = """
[run]
name = "x"
[model]
path = "{folder}/model"
[data]
train = "{folder}/data.jsonl"
[roles.trainer]
kind = "megatron"
count = 4
[megatron]
tp = {tp}
"""


@pytest.mark.parametrize(("tp", "text"), [(2, ""), (4, "megatron.tp = 4: does not divide the model's")])
def test_a_layout_that_does_not_fit_the_model(tmp_path: Path, tp: int, text: str) -> None:
    make_tiny_model(tmp_path / "model", "0p5m")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path, tp=tp))
    config = load_config(str(tmp_path / "run.toml"), [])
    trainers = [actor for actor in place(config, 1) if actor.role == "trainer"]
    assert len(trainers) == 4
    if not text:
        check_node(config, trainers)
        return
    with pytest.raises(ConfigError) as caught:
        check_node(config, trainers)
    assert text in str(caught.value)
