"""What cannot be the reference or the critic of the torch trainer is told by the key that names it, to the planner too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from myxa.actors.models.hf_folder import read_config
from myxa.actors.models.second_model import check_reference, critic_config, critic_parameters, reference_parameters
from myxa.actors.models.tiny import make_tiny_model
from myxa.core.config import AlgoConfig, CriticConfig
from myxa.core.errors import ConfigError

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A plain decoder, and a mixture of experts over its vocabulary."""
    plain, mixture = tmp_path / "plain", tmp_path / "mixture"
    for folder in (plain, mixture):
        make_tiny_model(folder, "0p5m", seed=0)
    config = json.loads((mixture / "config.json").read_text())
    (mixture / "config.json").write_text(json.dumps({**config, **EXPERTS}))
    return plain, mixture


def test_a_mixture_of_experts_is_refused_by_the_key_that_names_it(folders: tuple[Path, Path]) -> None:
    model = read_config(folders[0])
    algo = AlgoConfig(kl_coef=0.1, ref_path=str(folders[1]))
    critic = CriticConfig(enabled=True, path=str(folders[1]))
    with pytest.raises(ConfigError, match="algo.ref_path: the torch trainer's reference model .*qwen3_moe"):
        check_reference(algo, model, is_any_shape=True)
    with pytest.raises(ConfigError, match="critic.path: the torch trainer's critic .*qwen3_moe"):
        critic_config(critic, model)
    assert reference_parameters(algo, model) == model.num_parameters, "the plan goes on; others tell of the folder"
    assert critic_parameters(critic, model) > model.num_parameters - model.vocab_size * model.hidden_size
