"""Text <-> token ids by the model folder's own `tokenizer.json` and chat template.

Implements `core.protocols.Tokenizer`. Needs `tokenizers` and `jinja2`; neither torch nor transformers, so the rollout's
light paths and the launcher may use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ...core.errors import DataError, ModelError
from ...core.samples import Message
from .chat_template import ChatTemplate, PlainText, load_chat_template, read_eos_token
from .hf_folder import CONFIG, TOKENIZER, find_tokenizer, read_eos_token_ids, read_json


class FolderTokenizer:
    """The tokenizer of one model folder."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | PlainText, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        """Ids the tokenizer knows; the model's embedding may have more rows."""
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        """The end-of-turn token first, then the other ids that end a generation."""
        self.template_place: str = template.place
        """Where the chat template was found, for messages."""

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation. Raises DataError when the template refuses it."""
        return self.encode(self.render_text(messages, add_generation_prompt=add_generation_prompt, tools=tools))

    def render_text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The same as text."""
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added; special tokens written out in the text are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids. Raises DataError for an id that cannot be one; ids of padding rows decode to nothing."""
        try:
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        except (OverflowError, TypeError) as err:
            raise DataError(f"cannot decode token ids: {err}", remedy="ids are whole numbers from 0 on") from err


def load_tokenizer(folder: str | Path, template: ChatTemplate | PlainText | None = None) -> FolderTokenizer:
    """Read the folder's tokenizer. `template`: instead of the folder's own; `PlainText()` where nothing is rendered.

    Raises ModelError naming the file that is missing or broken.
    """
    root = Path(folder)
    path = find_tokenizer(root)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as err:  # the library raises bare Exception for whatever is wrong in the file
        raise ModelError(f"cannot read {path}: {err}", remedy="download the file again") from err
    template = load_chat_template(root) if template is None else template
    end_ids = load_eos_token_ids(root, tokenizer)
    _check_vocabulary(root, tokenizer, end_ids)
    return FolderTokenizer(tokenizer, template, end_ids)


def _check_vocabulary(root: Path, tokenizer: tokenizers.Tokenizer, end_ids: Sequence[int]) -> None:
    """Raise ModelError for a token that the embedding has no row for; a folder without a model has no embedding."""
    if not (root / CONFIG).exists():
        return
    num_rows = read_json(root / CONFIG, remedy="mend the file").get("vocab_size")
    if not isinstance(num_rows, int):
        return
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    text, last = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if last >= num_rows:
        raise ModelError(
            f"{root / TOKENIZER}: token {text!r} has id {last}, the embedding has {num_rows} rows (vocab_size)",
            remedy="take the token out of the tokenizer, or enlarge the embedding (resize_token_embeddings)",
        )
    beyond = [one for one in end_ids if one >= num_rows]
    if beyond:
        raise ModelError(
            f"{root}: end token {beyond[0]} (eos_token_id) is beyond the embedding's {num_rows} rows (vocab_size)",
            remedy="set eos_token_id of generation_config.json and config.json to the model's own",
        )


def load_eos_token_ids(folder: str | Path, tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """All ids that end a generation: the tokenizer's end-of-turn token, then those of the configs.

    Raises ModelError when there is none, or one that the tokenizer does not know: generation could only ever end by
    length.
    """
    named = read_eos_token(folder)
    end_of_turn = tokenizer.token_to_id(named)
    if named and end_of_turn is None:
        raise ModelError(
            f"{folder}: eos_token {named!r} of tokenizer_config.json is not in {TOKENIZER}",
            remedy="name a token of the vocabulary: with this one no answer could end",
        )
    ids = (*(() if end_of_turn is None else (end_of_turn,)), *read_eos_token_ids(folder))
    if not ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token",
            remedy="set eos_token in tokenizer_config.json or eos_token_id in generation_config.json",
        )
    return tuple(dict.fromkeys(ids))
