"""What cannot be the reference or the critic is told by the key that names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from myxa.actors.models.hf_folder import check_second_model, read_config
from myxa.actors.models.tiny import make_tiny_model
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
    for key in ("algo.ref_path", "critic.path"):
        with pytest.raises(
            ConfigError, match=rf"{key} = .*mixture: its model_type is qwen3_moe, that of model.path is"
        ):
            check_second_model(key, str(folders[1]), model)
