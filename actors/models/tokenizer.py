"""Text <-> token ids by the model folder's own `tokenizer.json` and chat template.

Implements `core.protocols.Tokenizer`. Needs `tokenizers` and `jinja2`; neither torch nor transformers, so the rollout's
light paths and the launcher may use it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from ...core.errors import DataError, ModelError, raised_as
from ...core.files import read_regular
from ...core.samples import Message
from .chat_template import (
    ChatTemplate,
    PlainText,
    TemplateParts,
    TemplateSettings,
    template_of,
)
from .hf_folder import CONFIG, MAX_TOKENIZER_BYTES, TOKENIZER, find_tokenizer, read_eos_token_ids
from .tokenizer_files import (
    ADDED_TOKENS,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    LibraryError,
    library_errors,
    read_hf_tokenizer,
    read_object,
)

MAX_TOKENIZER_COMMAS = 1 << 22
"""What the library makes of each while it reads takes 100 bytes; a vocabulary of 262,144 tokens has a third of it."""
MAX_GROWTH = 1000
"""A normalizer or decoder may make a text so many times longer."""
TRIED_CHARS = 2048
MAX_TRIED_SECONDS = 0.1
"""For a text of one letter, repeated up to so often; honest files need a thousandth."""
MAX_TRIED_LETTERS = 16

MAX_HANDED_BYTES = 48 << 20
"""To a worker, in a frame of 64 MiB; the JSON of 262,144 tokens has half of it."""

Tools = Sequence[dict[str, Any]]


class TokenizerParts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tokenizer for another process, which reads no folder then and needs no transformers: that takes half a second
    and 60 MB to import."""

    backend: str
    """As in `tokenizer.json`."""
    splits_special: bool
    """Special tokens in texts are none."""
    eos_token_ids: tuple[int, ...]
    beyond: frozenset[int]
    template: TemplateParts | None
    """None: texts as they are."""


@dataclass(eq=False)
class FolderTokenizer:
    """The tokenizer of one model folder."""

    tokenizer: tokenizers.Tokenizer
    template: ChatTemplate | PlainText
    eos_token_ids: tuple[int, ...]
    """The end-of-turn token first, then the other ids that end a generation."""
    beyond: frozenset[int] = frozenset()
    """Ids of tokens that the model's embedding has no row for; no text may hold them."""

    def __post_init__(self) -> None:
        self.vocab_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True) - len(self.beyond)
        """Ids the tokenizer knows; the model's embedding may have more rows."""
        self.template_place: str = self.template.place
        """Where the chat template was found, for messages."""

    @classmethod
    def of(cls, parts: TokenizerParts) -> FolderTokenizer:
        """As it was where the parts were taken from."""
        backend: Any = tokenizers.Tokenizer.from_str(parts.backend)
        backend.encode_special_tokens = parts.splits_special
        template = PlainText() if parts.template is None else ChatTemplate(parts.template)
        return cls(backend, template, parts.eos_token_ids, parts.beyond)

    def parts(self) -> TokenizerParts:
        """Raises ModelError for one that is too large for a message."""
        backend = self.tokenizer.to_str()
        if (num_bytes := len(backend.encode())) > MAX_HANDED_BYTES:
            raise ModelError(
                f"the tokenizer has {num_bytes} bytes as JSON, worker processes take up to {MAX_HANDED_BYTES}",
                remedy="take tokens out of it, or a workflow that is built in, which needs no worker",
            )
        return TokenizerParts(
            backend=backend,
            splits_special=bool(self.tokenizer.encode_special_tokens),
            eos_token_ids=self.eos_token_ids,
            beyond=self.beyond,
            template=self.template.parts if isinstance(self.template, ChatTemplate) else None,
        )

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = (), goes_on: bool = False
    ) -> list[int]:
        """Token ids. `goes_on`: the last message is left open. Raises DataError when the template refuses it."""
        return self.encode(
            self.render_text(messages, add_generation_prompt=add_generation_prompt, tools=tools, goes_on=goes_on)
        )

    def render_text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = (), goes_on: bool = False
    ) -> str:
        """The same as text."""
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, goes_on=goes_on)

    def model_spans(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[tuple[int, int], ...] | None:
        """Places in the text that the template calls the model's (`{% generation %}`); None: it calls none so."""
        return self.template.write(messages, tools=tools)[1] if self.template.has_blocks(tools) else None

    def first_mark(self) -> int | None:
        """The token that the tokenizer puts before texts, where nothing else writes it."""
        ids = self.tokenizer.encode("a").ids
        return ids[0] if ids and ids[0] not in self.encode("a") else None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added; special tokens written out in the text are recognised."""
        try:
            with library_errors():
                ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as err:  # lone surrogates have no bytes
            raise DataError(f"a text cannot be encoded: {err}", remedy="write it in valid Unicode") from err
        except LibraryError as err:
            raise DataError(
                f"a text of {len(text)} characters cannot be encoded by the model's {TOKENIZER}: {err}",
                remedy="mend the tokenizer, or leave the text out",
            ) from err
        if self.beyond and not self.beyond.isdisjoint(ids):
            beyond = self.tokenizer.id_to_token(next(token for token in ids if token in self.beyond))
            raise DataError(
                f"a text holds {beyond!r}, a token that the model's embedding has no row for",
                remedy="take it out of the text, or name the model's own tokens in tokenizer_config.json",
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids. Raises DataError for an id that cannot be one; ids of padding rows decode to nothing."""
        remedy, causes = "ids are whole numbers from 0 on", (OverflowError, TypeError, LibraryError)
        with raised_as(DataError, "cannot decode token ids", *causes, remedy=remedy), library_errors():
            return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)


def load_tokenizer(folder: str | Path, template: TemplateSettings | PlainText | None = None) -> FolderTokenizer:
    """`template`: the run's settings; `PlainText()` where nothing is rendered. Raises ModelError naming the file."""
    root = Path(folder)
    vocabulary = set(read_tokenizer(root).get_vocab(with_added_tokens=True))
    hf = read_hf_tokenizer(root)
    tokenizer: tokenizers.Tokenizer = hf.backend_tokenizer
    _check_pace(root / TOKENIZER, tokenizer)
    end_ids = load_eos_token_ids(root, hf, vocabulary)
    beyond = _beyond_embedding(root, tokenizer, end_ids, vocabulary)
    rendered = template if isinstance(template, PlainText) else template_of(root, template, hf)
    return FolderTokenizer(tokenizer, rendered, end_ids, beyond)


def read_tokenizer(folder: str | Path) -> tokenizers.Tokenizer:
    """The folder's `tokenizer.json` alone. Raises ModelError, also for one that is made to fill the memory."""
    path = find_tokenizer(folder)
    causes = (OSError, TypeError, LibraryError)
    with raised_as(ModelError, f"cannot read {path}", *causes, remedy="download the file again"):
        content = read_regular(path, MAX_TOKENIZER_BYTES)
        if (num_commas := content.count(b",")) > MAX_TOKENIZER_COMMAS:
            raise OSError(f"it has {num_commas} commas, more than {MAX_TOKENIZER_COMMAS}")
        with library_errors():
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
    del content
    _check_parts(path, tokenizer)
    return tokenizer


def _check_parts(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ModelError for a normalizer or decoder that makes texts longer without measure, and for ids by chance."""
    backend: Any = tokenizer
    for name in ("normalizer", "decoder"):
        growth = 1.0
        for step in _steps(getattr(backend, name)):
            pattern = step.get("pattern", {}).get("String", "") if step.get("type") == "Replace" else ""
            growth *= max(1.0, len(step.get("content", "")) / max(1, len(pattern)))
        if growth > MAX_GROWTH:
            raise ModelError(
                f"{path}: the {name} may make a text {growth:.0f} times longer", remedy="do not use this folder"
            )
    dropout = getattr(backend.model, "dropout", None)
    if dropout:
        raise ModelError(
            f"{path}: the model has dropout {dropout}: the same text has other ids each time",
            remedy=f'set "dropout": null in {TOKENIZER}',
        )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Settings of a part of a tokenizer; of a sequence, those of all of its parts."""
    waiting: list[Any] = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        waiting += [*step.get("normalizers", ()), *step.get("pretokenizers", ()), *step.get("decoders", ())]
        yield step


def _check_pace(path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ModelError for a pattern that takes longer for each character the longer the text is: it would hang. Each
    letter is repeated twice as often until the limit, so that no trial takes much longer than the limit."""
    backend: Any = tokenizer
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    patterns = [step["pattern"]["Regex"] for step in steps if "Regex" in step.get("pattern", {})]
    if not patterns:
        return
    letters = dict.fromkeys(
        "a 1\n." + "".join(letter for pattern in patterns for letter in pattern if letter.isalnum())
    )
    for letter in list(letters)[:MAX_TRIED_LETTERS]:
        length = 16
        while length <= TRIED_CHARS:
            started, why = time.thread_time(), ""
            try:
                with library_errors():
                    tokenizer.encode(letter * length + "\x00", add_special_tokens=False)
            except LibraryError as err:
                why = str(err)
            took = time.thread_time() - started
            if why or took > MAX_TRIED_SECONDS:
                raise ModelError(
                    f"{path}: a text of {length} times {letter!r} takes {took:.1f} s to cut into tokens"
                    f"{why and ': '}{why}",
                    remedy=f"do not use this folder: a pattern of its {TOKENIZER} can hang",
                )
            length *= 2


def _beyond_embedding(
    root: Path, tokenizer: tokenizers.Tokenizer, end_ids: Sequence[int], texts: Collection[str]
) -> frozenset[int]:
    """Ids of tokens that `tokenizer.json` does not have (`known`) and the embedding has no row for. Raises ModelError
    for one of its own of that kind; a folder without a model has no embedding."""
    num_rows = read_object(root / CONFIG).get("vocab_size")
    if not isinstance(num_rows, int):
        return frozenset()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    beyond = {index for text, index in vocabulary.items() if text not in texts and index >= num_rows}
    text, last = max(((text, vocabulary.get(text, -1)) for text in texts), key=lambda item: item[1], default=("", -1))
    if last >= num_rows:
        raise ModelError(
            f"{root / TOKENIZER}: token {text!r} has id {last}, the embedding has {num_rows} rows (vocab_size)",
            remedy="take the token out of the tokenizer, or enlarge the embedding (resize_token_embeddings)",
        )
    ends = [token for token in end_ids if token >= num_rows]
    if ends:
        raise ModelError(
            f"{root}: end token {ends[0]} (eos_token_id) is beyond the embedding's {num_rows} rows (vocab_size)",
            remedy="set eos_token_id of generation_config.json and config.json to the model's own",
        )
    return frozenset(beyond)


def load_eos_token_ids(folder: Path, hf_tokenizer: Any, vocabulary: Collection[str]) -> tuple[int, ...]:
    """All ids that end a generation: the end-of-turn token of transformers' tokenizer, then those of the configs.
    `known`: tokens of `tokenizer.json`. Raises ModelError for none, or one that no file knows."""
    settings, eos_token = read_object(folder / TOKENIZER_CONFIG), str(hf_tokenizer.eos_token or "")
    added = [token["content"] for token in settings.get("added_tokens_decoder", {}).values()]
    is_known = eos_token in vocabulary or eos_token in (*added, *read_object(folder / ADDED_TOKENS))
    if eos_token and not is_known and "eos_token" in {**settings, **read_object(folder / SPECIAL_TOKENS_MAP)}:
        raise ModelError(
            f"{folder}: eos_token {eos_token!r} of {TOKENIZER_CONFIG} is not in {TOKENIZER}",
            remedy="name a token of the vocabulary: with this one no answer could end",
        )
    own_ids = (hf_tokenizer.backend_tokenizer.token_to_id(eos_token),) if eos_token and is_known else ()
    ids = (*own_ids, *read_eos_token_ids(folder))
    if not ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token",
            remedy="set eos_token in tokenizer_config.json or eos_token_id in generation_config.json",
        )
    return tuple(dict.fromkeys(ids))
