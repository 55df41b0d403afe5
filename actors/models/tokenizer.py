"""Text <-> token ids by the model folder's own `tokenizer.json` and chat template.

Implements `core.protocols.Tokenizer`. Needs `tokenizers` and `jinja2`; neither torch nor transformers, so the rollout's
light paths and the launcher may use it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from ...core.errors import DataError, ModelError
from ...core.files import read_regular
from ...core.samples import Message
from .chat_template import ChatTemplate, PlainText, load_chat_template
from .hf_folder import CONFIG, MAX_TOKENIZER_BYTES, TOKENIZER, find_tokenizer, read_eos_token_ids, read_json
from .tokenizer_files import TokenizerFiles, read_tokenizer_files

MAX_TOKENIZER_COMMAS = 1 << 22
"""What the library makes of each while it reads takes 100 bytes; a vocabulary of 262,144 tokens has a third of it."""
MAX_GROWTH = 1000
"""A normalizer or decoder may make a text so many times longer."""
TRIED_CHARS = 2048
MAX_TRIED_SECONDS = 0.1
"""For a text of one letter, repeated up to so often; honest files need a thousandth."""
MAX_TRIED_LETTERS = 16

Tools = Sequence[dict[str, Any]]


class LibraryError(Exception):
    """The tokenizers library cannot do it; for whatever is wrong in a file it raises Exception itself, or a panic."""


@contextmanager
def library_errors() -> Generator[None, None, None]:
    """What the library raises becomes LibraryError; TypeError and OverflowError, for arguments, stay what they are."""
    try:
        yield
    except (TypeError, OverflowError):
        raise
    except Exception as err:
        raise LibraryError(str(err)) from err
    except BaseException as err:
        if type(err).__name__ != "PanicException":  # of pyo3_runtime, which cannot be imported
            raise
        raise LibraryError(str(err)) from err


class FolderTokenizer:
    """The tokenizer of one model folder."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: ChatTemplate | PlainText,
        eos_token_ids: Sequence[int],
        beyond: frozenset[int] = frozenset(),
    ) -> None:
        """`beyond`: ids of tokens that the model's embedding has no row for; no text may hold them."""
        self._tokenizer = tokenizer
        self._template = template
        self._beyond = beyond
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True) - len(beyond)
        """Ids the tokenizer knows; the model's embedding may have more rows."""
        self.eos_token_ids: tuple[int, ...] = tuple(eos_token_ids)
        """The end-of-turn token first, then the other ids that end a generation."""
        self.template_place: str = template.place
        """Where the chat template was found, for messages."""

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
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, goes_on=goes_on
        )

    def model_spans(self, messages: Sequence[Message], tools: Tools = ()) -> tuple[tuple[int, int], ...] | None:
        """Places in the text that the template calls the model's (`{% generation %}`); None: it calls none so."""
        return self._template.write(messages, tools=tools).generation if self._template.has_blocks(tools) else None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added; special tokens written out in the text are recognised."""
        try:
            with library_errors():
                ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as err:  # lone surrogates have no bytes
            raise DataError(f"a text cannot be encoded: {err}", remedy="write it in valid Unicode") from err
        except LibraryError as err:
            raise DataError(
                f"a text of {len(text)} characters cannot be encoded by the model's {TOKENIZER}: {err}",
                remedy="mend the tokenizer, or leave the text out",
            ) from err
        if self._beyond and not self._beyond.isdisjoint(ids):
            beyond = self._tokenizer.id_to_token(next(one for one in ids if one in self._beyond))
            raise DataError(
                f"a text holds {beyond!r}, a token that the model's embedding has no row for",
                remedy="take it out of the text, or name the model's own tokens in tokenizer_config.json",
            )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids. Raises DataError for an id that cannot be one; ids of padding rows decode to nothing."""
        try:
            with library_errors():
                return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        except (OverflowError, TypeError, LibraryError) as err:
            raise DataError(f"cannot decode token ids: {err}", remedy="ids are whole numbers from 0 on") from err


def load_tokenizer(folder: str | Path, template: ChatTemplate | PlainText | None = None) -> FolderTokenizer:
    """Read the folder's tokenizer. `template`: instead of the folder's own; `PlainText()` where nothing is rendered.
    Raises ModelError naming the file that is missing or broken."""
    root = Path(folder)
    tokenizer = read_tokenizer(root)
    files = read_tokenizer_files(root)
    known = set(tokenizer.get_vocab(with_added_tokens=True))
    files.complete(tokenizer)
    _check_pace(root / TOKENIZER, tokenizer)
    end_ids = load_eos_token_ids(root, tokenizer, files, known)
    beyond = _beyond_embedding(root, tokenizer, end_ids, files.assumed - known)
    template = load_chat_template(root) if template is None else template
    return FolderTokenizer(tokenizer, template, end_ids, beyond)


def read_tokenizer(folder: str | Path) -> tokenizers.Tokenizer:
    """The folder's `tokenizer.json` alone. Raises ModelError, also for one that is made to fill the memory."""
    path = find_tokenizer(folder)
    try:
        content = read_regular(path, MAX_TOKENIZER_BYTES)
        num_commas = content.count(b",")
        if num_commas > MAX_TOKENIZER_COMMAS:
            raise OSError(f"it has {num_commas} commas, more than {MAX_TOKENIZER_COMMAS}")
        with library_errors():
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except (OSError, TypeError, LibraryError) as err:
        raise ModelError(f"cannot read {path}: {err}", remedy="download the file again") from err
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
    root: Path, tokenizer: tokenizers.Tokenizer, end_ids: Sequence[int], assumed: frozenset[str]
) -> frozenset[int]:
    """Ids of tokens `assumed` that the embedding has no row for. Raises ModelError for others of that kind; a folder
    without a model has no embedding."""
    if not (root / CONFIG).exists():
        return frozenset()
    num_rows = read_json(root / CONFIG, remedy="mend the file").get("vocab_size")
    if not isinstance(num_rows, int):
        return frozenset()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    beyond = {index for text in assumed if (index := vocabulary.pop(text, -1)) >= num_rows}
    text, last = max(vocabulary.items(), key=lambda item: item[1], default=("", -1))
    if last >= num_rows:
        raise ModelError(
            f"{root / TOKENIZER}: token {text!r} has id {last}, the embedding has {num_rows} rows (vocab_size)",
            remedy="take the token out of the tokenizer, or enlarge the embedding (resize_token_embeddings)",
        )
    ends = [one for one in end_ids if one >= num_rows]
    if ends:
        raise ModelError(
            f"{root}: end token {ends[0]} (eos_token_id) is beyond the embedding's {num_rows} rows (vocab_size)",
            remedy="set eos_token_id of generation_config.json and config.json to the model's own",
        )
    return frozenset(beyond)


def load_eos_token_ids(
    folder: str | Path, tokenizer: tokenizers.Tokenizer, files: TokenizerFiles, known: Collection[str]
) -> tuple[int, ...]:
    """All ids that end a generation: the tokenizer's end-of-turn token, then those of the configs. `known`: tokens of
    `tokenizer.json`. Raises ModelError when there is none, or one that no file knows: generation could only ever end by
    length."""
    named = files.special_texts.get("eos_token", "")
    is_known = named in known or named in files.added_texts
    end_of_turn = tokenizer.token_to_id(named) if named and is_known else None
    if named and end_of_turn is None and named not in files.assumed:
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
