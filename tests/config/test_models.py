"""`[models.NAME]` and `[judge]`: what is refused before a run, by which key; what a model's own view of the run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from myxa.core.config import RunConfig, dump_config, load_config

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}}


def made(name: str = "critic", more: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    return RunConfig.model_validate({**BASE, "models": {name: {"path": "x", **model}}, **(more or {})})


@pytest.mark.parametrize(("name", "model", "more", "said"), [
    ("Critic", {}, {}, "models.Critic: a model's name is"), ("policy", {}, {}, "models.policy: a model's name is"),
    ("critic", {"nodes": "*"}, {}, "models.critic.nodes: must name the nodes"),
    ("critic", {"devices": "0"}, {}, 'models.critic.devices: models.critic.kind = "embedded" needs models.critic.devices = "cpu"'),
    ("critic", {"sglang": {"tp_size": 2}}, {}, 'models.critic.sglang: needs models.critic.kind = "sglang"'),
    ("critic", {"kind": "sglang", "sglang": {"port": 1}}, {}, "models.critic.sglang.port: is myxa's own"),
    ("critic", {"max_new_tokens": 8, "engine": {"context_length": 8}}, {}, "models.critic.max_new_tokens: leaves no"),
    ("critic", {"kind": "sglang", "devices": "1"}, {"roles": {"trainer": {"devices": "0-1", "count": 2}}},
     "models.critic.devices: names GPU 1, as roles.trainer.devices does"),
    ("critic", {"kind": "sglang", "engine": {"attach": ["http://a:1/"]}},
     {"engine": {"attach": ["http://a:1"]}, "roles": {"rollout": {"kind": "sglang"}}},
     "models.critic.engine.attach: names http://a:1, as engine.attach does"),
    ("critic", {}, {"algo": {"kind": "sft"}, "data": {"train": "t", "answer_key": "a"}}, "no rollouts that would ask"),
    ("critic", {}, {"judge": {"model": "critic"}}, 'reward.fn: must be "judge"'),
    ("critic", {"engin": {}}, {}, "models.critic.engin"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_its_own_key(
    name: str, model: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        made(name, more, **model)
    assert said in str(caught.value)


def test_a_model_s_view_has_its_folder_engine_and_a_seed_of_its_own() -> None:
    config = made(engine={"max_running": 3}, temperature=0.5, chat_template_kwargs={"a": 1})
    view = config.of_model("critic")
    assert (view.model.path, view.engine.max_running, view.rollout.temperature) == ("x", 3, 0.5)
    assert view.data.chat_template_kwargs == {"a": 1} and view.roles.rollout.count == 1
    other = made("user").of_model("user")
    assert len({config.run.seed, view.run.seed, other.run.seed}) == 3, "a copy of the policy does not say what it says"


def test_a_frozen_run_file_is_the_same_run(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("""
[model]
path = "m"
[data]
train = "t"
[reward]
fn = "judge"
[judge]
model = "critic"
scores = { yes = 1, no = 0.0 }
template = "{answer} {prompt}?"
[models.critic]
path = "critic"
sglang = {}
engine = { max_running = 7 }
""")
    config = load_config([file])
    (tmp_path / "frozen.toml").write_text(dump_config(config))
    again = load_config([tmp_path / "frozen.toml"])
    assert again == config and again.models["critic"].path == str(tmp_path / "critic")


@pytest.mark.parametrize(("port", "served"), [(0, -1), (-1, -1), (9100, 9100)])
def test_a_frozen_run_file_with_a_port_for_prometheus_serves_it_with_the_dashboard(
    port: int, served: int, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n[data]\ntrain = "t"\n')
    config = load_config([tmp_path / "run.toml"])
    earlier = dump_config(config).replace("[monitor]\n", f"[monitor]\nprometheus_port = {port}\n")
    earlier = earlier.replace("[async]\n", "[async]\nwindow = 0\n")
    (tmp_path / "frozen.toml").write_text(earlier)
    again = load_config([tmp_path / "frozen.toml"])
    assert again.control.dashboard_port == served
    assert (again.monitor, again.trainer, again.run) == (config.monitor, config.trainer, config.run)
