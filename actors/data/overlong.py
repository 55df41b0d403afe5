"""Prompts that are too long, found at the start: how many tokens a row's prompt has, as the run's template writes it.

Knows tokenizers and rows; must not know files.
"""

from __future__ import annotations

from ...core.config import RunConfig
from ...core.errors import DataError, TemplateError
from ...core.protocols import Tokenizer
from ...core.samples import Prompt
from ..workflows.turn_renderer import TurnRenderer
from .layout import Item
from .row_file import RowError


class PromptLimit:
    """The most tokens that a prompt may have."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, why: str, *, drops: bool) -> None:
        """`why`: where the number is from. `drops`: rows above it are left out; else the first one ends the run."""
        self._renderer = TurnRenderer(tokenizer)
        self._max_tokens = max_tokens
        self._why = why
        self.drops = drops

    def excess(self, item: Item) -> str:
        """What is too long about a row; empty: nothing. Raises RowError for a prompt that cannot be written."""
        prompt = Prompt(group_id=0, row=0, pass_index=0, messages=item.messages, tools=item.tools)
        try:
            num_tokens = len(self._renderer.prompt(prompt))
        except (DataError, TemplateError) as error:
            raise RowError(error.message, error.remedy) from error
        if num_tokens <= self._max_tokens:
            return ""
        return f"the prompt has {num_tokens:,} tokens, the limit is {self._max_tokens:,} ({self._why})"


def limit_of(config: RunConfig) -> PromptLimit | None:
    """By the run's model and `data.overlong`; None: rows are not measured. Raises ModelError."""
    data = config.data
    if data.overlong == "pass":
        return None
    # Only now: most runs measure nothing, and need no tokenizer to read their data.
    from ..models.chat_template import template_of
    from ..models.hf_folder import read_config
    from ..models.tokenizer import load_tokenizer

    max_tokens, why = data.max_prompt_tokens, "data.max_prompt_tokens"
    if not max_tokens:
        max_tokens = (config.engine.context_length or read_config(config.model.path).context_length) - 1
        why = "the context less one"
    tokenizer = load_tokenizer(config.model.path, template_of(config.model.path, data))
    return PromptLimit(tokenizer, max_tokens, why, drops=data.overlong == "drop")
