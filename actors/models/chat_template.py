"""The chat template of a model folder: finds it, compiles it in a sandbox, renders conversations.

A template is a program that came with the weights, so it runs in jinja2's immutable sandbox with a bounded source and
sees nothing but the messages and the special tokens. Library considered: transformers' `apply_chat_template`, which
does the same at the price of seconds of import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...core.errors import DataError, ModelError
from .hf_folder import read_json

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
MAX_TEMPLATE_CHARS = 1_000_000
DEFAULT_NAME = "default"
SPECIAL_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Tokens a template may ask for by name."""


class ChatTemplate:
    """A compiled template. `render` is pure: same messages, same text."""

    def __init__(self, source: str, place: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"{place}: the chat template has {len(source)} characters", remedy="use an honest one")
        self._place = place
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json  # pyright: ignore[reportUnknownMemberType] -- jinja2 says a bare dict
        environment.globals["raise_exception"] = _refuse  # pyright: ignore[reportUnknownMemberType] -- the same
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as err:
            raise ModelError(f"{place}: the chat template does not compile: {err}", remedy="mend the template") from err

    def render(self, messages: Sequence[tuple[str, str]], *, add_generation_prompt: bool) -> str:
        """Text of a conversation of (role, content) pairs. Raises DataError when the template refuses it."""
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as err:
            roles = ", ".join(role for role, _ in messages)
            raise DataError(
                f"the chat template of {self._place} refuses a conversation of roles [{roles}]: {err}",
                remedy="use the roles this model was made for, in the order it expects",
            ) from err


def _to_json(value: Any, indent: int | None = None) -> str:
    """As HuggingFace's templates expect: no HTML escapes, no sorted keys."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def load_chat_template(folder: str | Path) -> ChatTemplate:
    """The folder's template: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

    Raises ModelError naming both files when neither has one.
    """
    root = Path(folder)
    settings = _tokenizer_config(root)
    special = {key: text for key in SPECIAL_KEYS if (text := _text(settings, key))}
    path = root / TEMPLATE_FILE
    if path.exists():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), special)
        except (OSError, UnicodeDecodeError) as err:
            raise ModelError(f"cannot read {path}: {err}", remedy="mend the file") from err
    found = settings.get("chat_template")
    if isinstance(found, list):  # several named ones
        named = cast("list[dict[str, Any]]", found)
        found = next((t.get("template") for t in named if t.get("name") == DEFAULT_NAME), None)
    if not isinstance(found, str) or not found:
        raise ModelError(
            f"{root} has no chat template: neither {TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG}",
            remedy=f"put the template of the model's chat variant into {path}",
        )
    return ChatTemplate(found, str(root / TOKENIZER_CONFIG), special)


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
