"""Any causal language model of transformers as the policy (`trainer.impl = "hf"`): a slower way to train a family that
`model.py` does not compute.

The model is read by `from_pretrained`, so names and layouts of the folder are transformers' business, on the way in and
out. Rows are padded to the longest, prompts are not shared, and the logits of whole rows are kept: a large vocabulary
needs a small `trainer.max_tokens_per_microbatch`. Padding follows the tokens, and a causal model never looks ahead, so
it changes no score. There is no dropout and no auxiliary loss: a pass without gradient gives the scores of one with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from ....core.errors import ModelError, TrainError
from ...models.model_config import ModelConfig
from ..adapters import is_adapter
from ..vocab_scores import Temperature, TokenScores, kept_logprobs
from .layout import Layout
from .model import PolicyModel

SHOWN = 3
RANDOM = ("dropout", "pdrop", "jitter")
"""What a key of a config has in its name that draws numbers in the forward pass."""


class TransformersModel(PolicyModel):
    """Parameters keep the names that transformers gives them in memory; `for_folder` gives the folder's."""

    def __init__(self, folder: str, config: ModelConfig, *, dtype: torch.dtype, recomputes: bool) -> None:
        """Masters are float32, products run in `dtype`. Raises ModelError where transformers does not know the model,
        or for weights that do not fit it."""
        super().__init__(dtype)
        self._config = config
        self.inner = cast(nn.Module, _read(folder, config))
        for module in self.inner.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # its row would get no gradient, and some models pad with their end token
        if recomputes:
            inner: Any = self.inner
            enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self.inner.train(recomputes)  # transformers recomputes in this mode only; nothing else depends on it
        _check_names(self._folder_state(lambda tensor: tensor), config, folder)

    @property
    def layers(self) -> nn.ModuleList:
        """The largest list of modules: what FSDP shards one by one."""
        lists = [module for module in self.inner.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=lambda modules: sum(p.numel() for p in modules.parameters()), default=nn.ModuleList())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.inner.named_parameters(*args, **kwargs)

    @property
    def body(self) -> nn.Module:
        return self.inner

    def get_parameter(self, target: str) -> nn.Parameter:
        return self.inner.get_parameter(target)

    def for_folder(self, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        state = self._folder_state(gather)
        for name in self._config.tensor_shapes():
            yield name, state[name]

    def forward(self, layout: Layout, needs_entropy_grad: bool = False) -> TokenScores:
        logits_NV = self._logits(layout)
        logits_MV = logits_NV.index_select(0, layout.row_of_M)
        scores = _scores(logits_MV, layout.targets_M, layout.temperature, layout.kept_MK)
        return scores if needs_entropy_grad else TokenScores(scores.logprobs_M, scores.entropy_M.detach())

    def _logits(self, layout: Layout) -> Tensor:
        """[N, V] of the tokens that predict something."""
        ids_S = layout.token_ids_T.index_select(0, layout.index_S)
        slots_N = layout.slots_T.index_select(0, layout.rows_N)
        longest = max(block.row_len for block in layout.blocks)
        rows: list[Tensor] = []
        places_N = torch.zeros_like(slots_N)
        start = num_rows = 0
        for block in layout.blocks:  # one call for all: under FSDP every rank makes as many
            end = start + block.num_rows * block.row_len
            ids_nL = ids_S[start:end].view(block.num_rows, block.row_len)
            rows.append(functional.pad(ids_nL, (0, longest - block.row_len)))
            row_N, column_N = (slots_N - start) // block.row_len, (slots_N - start) % block.row_len
            is_here_N = (slots_N >= start) & (slots_N < end)
            places_N = torch.where(is_here_N, (num_rows + row_N) * longest + column_N, places_N)
            start, num_rows = end, num_rows + block.num_rows
        with self._products():
            logits_nLV = cast(Any, self.inner)(input_ids=torch.cat(rows), use_cache=False).logits
        return logits_nLV.flatten(0, 1).index_select(0, places_N)

    def _products(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(next(self.inner.parameters()).device.type, self.dtype)

    def _folder_state(self, gather: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """HuggingFace name -> tensor, as transformers writes them into a folder."""
        from transformers.core_model_loading import revert_weight_conversion

        held = ((name, tensor) for name, tensor in self.inner.state_dict().items() if not is_adapter(name))
        state = {name: self.served(name, tensor, gather) for name, tensor in held}
        return cast("dict[str, Tensor]", revert_weight_conversion(cast(Any, self.inner), state))


def _read(folder: str, config: ModelConfig) -> Any:
    if config.fp8:
        raise ModelError(
            f"{folder} holds FP8 weights, which transformers does not train", remedy='leave trainer.impl = "hf" out'
        )
    try:
        model_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        for name, value in model_config.to_dict().items():
            if isinstance(value, float) and any(part in name for part in RANDOM):
                setattr(model_config, name, 0.0)
        model, facts = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told below
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"transformers cannot read {folder}, a model of type {config.model_type}: {str(error)[:400]}",
            remedy="use a folder that AutoModelForCausalLM.from_pretrained reads",
        ) from error
    for kind, remedy in (("missing", "export the folder again"), ("mismatched", "its config.json is of another model")):
        if wrong := sorted(str(key) for key in facts[f"{kind}_keys"]):
            raise ModelError(
                f"{folder}: {len(wrong)} weights are {kind}, {', '.join(wrong[:SHOWN])} among them", remedy=remedy
            )
    for name, module in model.named_modules() if config.kv_lora_rank else ():
        if name.endswith("_a_layernorm"):
            module.variance_epsilon = config.rms_norm_eps  # of latents: as in SGLang, see megatron/attention.py
    return model


def _check_names(state: dict[str, Tensor], config: ModelConfig, folder: str) -> None:
    """Raise TrainError if the trained model could not be written as a folder like the one that was read."""
    for name, shape in config.tensor_shapes().items():
        if name not in state or tuple(state[name].shape) != shape:
            difference = f"it has shape {tuple(state[name].shape)}" if name in state else "there is none"
            raise TrainError(
                f"{folder}: transformers does not give weight {name} of shape {shape} back: {difference}",
                remedy="write the folder once by transformers' save_pretrained, and train that one",
            )


def _scores(logits_MV: Tensor, targets_M: Tensor, temperature: Temperature, kept_MK: Tensor | None) -> TokenScores:
    """Lp = z[y] - log Z, H = log Z - sum p z, in float32; z = logits / temperature."""
    divisor = temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    log_p_MV = (logits_MV.float() / divisor).log_softmax(dim=1)
    logprobs_M = log_p_MV.gather(1, targets_M.unsqueeze(1)).squeeze(1)
    if kept_MK is not None:
        logprobs_M = kept_logprobs(log_p_MV, targets_M, kept_MK)
    entropy_M = -(log_p_MV.exp() * log_p_MV.clamp(min=torch.finfo(torch.float32).min)).sum(dim=1)
    return TokenScores(logprobs_M, entropy_M)
