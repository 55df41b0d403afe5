"""From a model folder to a core that can step. Blocks: for threads."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ....core.errors import EngineError
from ....memory.budget import EngineBudget, plan_engine
from ....memory.host import available_bytes
from ...models.chat_template import PlainText
from ...models.hf_folder import ModelConfig, check_values, open_weights, read_config
from ...models.tokenizer import load_tokenizer
from .allocation import plain_zeros
from .core import CoreOptions, EngineCore
from .lent_memory import LentMemory
from .options import EmbeddedOptions
from .weights import DTYPES, DecoderWeights

CPU_DTYPES = ("float32", "bfloat16")


def load_core(
    folder: Path, options: EmbeddedOptions, memory: LentMemory | None
) -> tuple[ModelConfig, EngineBudget, EngineCore]:
    """Raises ModelError for a bad folder, EngineError for impossible settings or too little memory."""
    if options.dtype not in CPU_DTYPES:
        raise EngineError(
            f"{options.name}: dtype {options.dtype} is not for CPUs", remedy=f"use {' or '.join(CPU_DTYPES)}"
        )
    config, budget = plan_folder(folder, options, memory)
    tokenizer = load_tokenizer(folder, PlainText())
    weights = new_weights(config, options, memory)
    with open_weights(folder, config) as tensors:
        check_values(config.tensor_shapes(), tensors, str(folder))
        weights.load(tensors, str(folder))
    core_options = CoreOptions(
        num_slots=budget.num_slots,
        context_length=budget.context_length,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        seed=options.seed,
        version=options.version,
        stream_interval=options.stream_interval,
        is_invariant=options.is_invariant,
        name=options.name,
        decode=partial(tokenizer.decode, skip_special=False),
    )
    allocate = None if memory is None else memory.allocate("kv_cache")
    core = EngineCore(config, weights, core_options, allocate)
    core.check_logits()
    return config, budget, core


def plan_folder(folder: Path, options: EmbeddedOptions, memory: LentMemory | None) -> tuple[ModelConfig, EngineBudget]:
    """How much room there is for what. Raises as `load_core`."""
    config = read_config(folder)
    config.require_plain(options.name)
    budget = plan_engine(
        config,
        dtype=options.dtype,
        max_running=options.max_running,
        context_length=options.context_length,
        available_bytes=available_bytes() if memory is None else min(available_bytes(), memory.device_bytes),
        share=options.memory_share,
    )
    return config, budget


def new_weights(config: ModelConfig, options: EmbeddedOptions, memory: LentMemory | None) -> DecoderWeights:
    """A set without values."""
    allocate = plain_zeros if memory is None else memory.allocate("weights")
    return DecoderWeights(config, DTYPES[options.dtype], allocate)
