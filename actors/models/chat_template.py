"""The chat template of a model folder: finds it, compiles it in a sandbox, renders conversations.

A template is a program that came with the weights, so it runs in jinja2's immutable sandbox with a bounded source and
sees nothing but the messages, the tools, the run file's own arguments and the special tokens: no clock, so the same
conversation is the same text on the day that a run is resumed too. Library considered: transformers'
`apply_chat_template`, which does the same at the price of seconds of import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...core.config import DataSettings
from ...core.errors import DataError, ModelError
from ...core.samples import Message
from .hf_folder import read_json

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_TEMPLATE_CHARS = 1_000_000
DEFAULT_NAME = "default"
SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Tokens a template may ask for by name."""


class ChatTemplate:
    """A compiled template. `render` is pure: same messages, same text."""

    def __init__(
        self, source: str, place: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any] | None = None
    ) -> None:
        """`arguments`: further names that it sees, such as `enable_thinking`. Raises ModelError."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"{place}: the chat template has {len(source)} characters", remedy="use an honest one")
        self.place = place
        """Where it was found, for messages."""
        self._arguments = {**special_tokens, **(arguments or {})}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType] -- jinja2 says a bare dict
        environment.globals["raise_exception"] = _refuse  # pyright: ignore[reportUnknownMemberType] -- the same
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as err:
            raise ModelError(f"{place}: the chat template does not compile: {err}", remedy="mend the template") from err

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """Text of a conversation. Raises DataError when the template refuses it."""
        try:
            return self._template.render(
                **self._arguments,
                messages=[message.as_template_sees() for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as err:
            roles = ", ".join(message.role for message in messages)
            raise DataError(
                f"the chat template of {self.place} refuses a conversation of roles [{roles}]: {err}",
                remedy="use the roles this model was made for, in the order it expects",
            ) from err


class PlainText:
    """Stands in for a chat template where there is none: texts as they are, one after the other."""

    place = "plain text"

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The contents in order; who says them is not written."""
        return "".join(message.content for message in messages)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As HuggingFace's templates expect: no HTML escapes, keys in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def load_chat_template(folder: str | Path, arguments: Mapping[str, Any] | None = None) -> ChatTemplate:
    """The folder's template: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

    `arguments`: see `ChatTemplate`. Raises ModelError naming both files when neither has one.
    """
    root = Path(folder)
    settings = _tokenizer_config(root)
    special = {key: text for key in SPECIAL_KEYS if (text := _text(settings, key))}
    path = root / TEMPLATE_FILE
    if path.exists():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), special, arguments)
        except (OSError, UnicodeDecodeError) as err:
            raise ModelError(f"cannot read {path}: {err}", remedy="mend the file") from err
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named ones
        named = cast("list[dict[str, Any]]", found)
        found = next((t.get("template") for t in named if t.get("name") == DEFAULT_NAME), None)
    if not isinstance(found, str) or not found:
        raise ModelError(
            f"{root} has no chat template: neither {TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG}",
            remedy=f"put the template of the model's chat variant into {path}, or set data.apply_chat_template = false",
        )
    return ChatTemplate(found, str(root / TOKENIZER_CONFIG), special, arguments)


def template_of(folder: str | Path, data: DataSettings) -> ChatTemplate | PlainText:
    """How a run's conversations are written. Raises ModelError."""
    return load_chat_template(folder, data.chat_template_kwargs) if data.apply_chat_template else PlainText()


def read_eos_token(folder: str | Path) -> str:
    """The tokenizer's own end-of-turn token by `tokenizer_config.json`, or an empty string."""
    return _text(_tokenizer_config(Path(folder)), "eos_token")


def _tokenizer_config(root: Path) -> dict[str, Any]:
    path = root / TOKENIZER_CONFIG
    return read_json(path, remedy="mend the file") if path.exists() else {}


def _text(settings: Mapping[str, Any], key: str) -> str:
    """Special tokens are written as text, or as an object with `content`."""
    value = settings.get(key)
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value).get("content")
    return value if isinstance(value, str) else ""
