"""G: speeds of rotary positions are those of transformers, to the bit, for every kind that we run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from myxa.actors.models.model_config import parse_model_config
from myxa.actors.models.rotary import rotary_gain, rotary_speeds

SIZES = {
    "vocab_size": 262, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "llama 3.1": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    "llama 3.2": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_theta": 5e5},
    "llama3, short": LLAMA3 | {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn as of Qwen": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e6},
    "yarn, all default": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor by the context": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, half a mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707},
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 64, "beta_slow": 2},
    "yarn, untruncated": {"rope_type": "yarn", "factor": 32.0, "truncate": False},
    "yarn, one ramp": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4, "beta_slow": 4, "truncate": False},
    "yarn, no stretch": {"rope_type": "yarn", "factor": 1.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear, old name": {"type": "linear", "factor": 2.5},
}


@pytest.mark.parametrize("name", list(CASES))
def test_g_speeds_and_gain_equal_those_of_transformers(name: str) -> None:
    model_type = ("llama", "qwen2", "qwen3")[list(CASES).index(name) % 3]
    source = {"model_type": model_type, **SIZES, "head_dim": 16, "rope_scaling": dict(CASES[name])}
    theirs: Any = transformers.AutoConfig.for_model(**copy.deepcopy(source))
    kind = theirs.rope_parameters["rope_type"]
    wanted, gain = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    ours = parse_model_config(source, "x")
    assert torch.equal(rotary_speeds(ours)[0], wanted)
    assert rotary_gain(ours) == gain


def test_g_a_stretch_that_was_added_by_hand_is_the_one_that_holds() -> None:
    """As model cards tell people to do, in a file that transformers 5 wrote."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    source = {"model_type": "qwen3", **SIZES, "rope_parameters": rope, "rope_scaling": CASES["yarn, all default"]}
    ours = parse_model_config(source, "x")
    assert ours.rope_scaling is not None
    assert ours.rope_scaling["rope_type"] == "yarn"
    assert ours.rope_theta == 1e4
