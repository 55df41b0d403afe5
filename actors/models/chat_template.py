"""The chat template of a model folder: finds it, compiles it, renders conversations as transformers does.

The same conversation, tools and arguments give the text of transformers' `apply_chat_template`, or a DataError. The
date of `strftime_now` is the run file's. A template is a program that came with the weights: it runs in jinja2's
immutable sandbox, sees no attribute that begins with an underscore, and has a budget for steps, for the length of a
text and for the size of a number (`OverBudget`).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ...core.errors import DataError, ModelError, TemplateError
from ...core.samples import REASONING_KEYS, Message
from ...core.suggestion import nearest
from .tokenizer_files import TOKENIZER_CONFIG

MAX_STEPS = 2_000_000
"""Turns of loops, calls and outputs of one rendering."""
MAX_SECONDS = 10.0
MAX_CHARS = 1 << 24
"""Of a text, and of all that is written."""
MAX_BITS = 4096
"""Of a whole number."""
MAX_WIDTH = 100_000
"""That a text is filled up to, and of a list that a filter makes."""
LONG_NUMBER = re.compile(r"\d{6,}")
PADDING = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "wordwrap", "tojson"}
)
RANDOM = ("random", "lipsum")


class OverBudget(Exception):
    """The template does more than a chat template has to do."""


class NoDate(Exception):
    """The template asks for today's date, and none was given."""


@dataclass(slots=True)
class _Budget:
    """Of one rendering."""

    num_steps: int = 0
    num_chars: int = 0
    ends_at: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)
    length: int = 0
    """Characters that have left the template."""
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def count(self, num: int = 1) -> None:
        self.num_steps += num
        if self.num_steps > MAX_STEPS or time.monotonic() > self.ends_at:
            raise OverBudget(f"it takes more than {MAX_STEPS} steps or {MAX_SECONDS:g} s")

    def write(self, num: int) -> None:
        self.num_chars += num
        self.count()
        check_length(self.num_chars)


_running = threading.local()


def _budget() -> _Budget:
    """Of the rendering under way; when constants are computed, one of its own."""
    return getattr(_running, "budget", None) or _Budget()


def check_length(num: float) -> None:
    """Raise OverBudget for a text or list that is too long."""
    if num > MAX_CHARS:
        raise OverBudget(f"it makes a text or list of more than {MAX_CHARS} characters or entries")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """One for each template. `day`: what `strftime_now` says; None: it raises NoDate."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, day: date | None) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], finalize=_written
        )
        filters = cast("dict[str, Any]", self.filters)  # pyright: ignore[reportUnknownMemberType] -- a bare dict
        names = cast("dict[str, Any]", self.globals)  # pyright: ignore[reportUnknownMemberType] -- the same
        for name, function in list(filters.items()):
            filters[name] = _guarded(name, function)
        filters |= {"tojson": _guarded("tojson", _to_json), "_steps": _steps, "_joined": _joined}
        for name in RANDOM:
            filters[name] = names[name] = _no_chance
        names |= {"raise_exception": _refuse, "strftime_now": _clock(day), "dict": _Dict(), "namespace": _Namespace}

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Counting().visit(source), *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 -- names are the template's
        _budget().count()
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_method(owner, name, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def run(template: jinja2.Template, names: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the places of its `{% generation %}` blocks. Raises what the template raises."""
    budget = _running.budget = _Budget()
    try:
        blocks: list[str] = []
        for block in template.generate(**names):
            blocks.append(block)
            budget.length += len(block)
            check_length(budget.length)
        return "".join(blocks), budget.spans
    finally:
        _running.budget = None


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` around what the model writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text, budget = caller(), _budget()
        budget.spans.append((budget.length, budget.length + len(text)))
        return text


class _Counting(NodeTransformer):
    """Loops count their turns; `~` looks at what it makes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_steps", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(parts, "_joined", [], [], None, None, lineno=node.lineno)


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    def __init__(*args: Any, **kwargs: Any) -> None:  # a name "self" is the template's
        self, mappings = args[0], args[1:]
        names = dict(*mappings, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: the name begins with an underscore")


def _steps(value: Any) -> Any:
    if isinstance(value, Sized):
        _budget().count(len(value) + 1)
        return value
    return _one_by_one(value)


def _one_by_one(value: Iterable[Any]) -> Iterator[Any]:
    for item in value:
        _budget().count()
        yield item


def _joined(parts: tuple[Any, ...]) -> str:
    texts = [str(part) for part in parts]
    check_length(sum(map(len, texts)))
    return "".join(texts)


def _written(value: Any) -> Any:
    _budget().write(len(value) if isinstance(value, str) else 1)
    return value


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        if LONG_NUMBER.search(left) or "*" in left:
            raise OverBudget("it formats a text with a width beyond all measure")
    elif operator == "+":
        check_length(_length(left) + _length(right))
    elif operator == "*" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif operator == "*" and isinstance(right, int):
        check_length(_length(left) * right)
    elif operator == "*" and isinstance(left, int):
        check_length(left * _length(right))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)


def _length(value: object) -> int:
    """Of a text or list; 0 of anything else."""
    return len(cast("Sized", value)) if isinstance(value, (str, list, tuple)) else 0


def _check_bits(num: int) -> None:
    if num > MAX_BITS:
        raise OverBudget(f"it makes a number of more than {MAX_BITS} bits")


def _check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Of a text; a filter's value is what it would be the method of."""
    values = (*args, *kwargs.values())
    if name in PADDING:
        _check_widths(values)
    elif name in ("format", "format_map"):
        if LONG_NUMBER.search(owner):
            raise OverBudget("it formats a text with a width beyond all measure")
        if re.search(r"\{[^{}]*\{", owner):  # a width that is an argument
            _check_widths(values)
    elif name == "replace" and len(args) >= 2:
        old, new = args[:2]
        if isinstance(owner, str) and isinstance(old, str) and isinstance(new, str):
            check_length(len(owner) + owner.count(old) * len(new))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        check_length(sum(_length(owner) + _length(item) for item in cast("list[object]", args[0])))
    elif name == "translate":
        raise OverBudget("it translates characters, which has no bound")


def _check_widths(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in values):
        raise OverBudget(f"it fills up to a width of more than {MAX_WIDTH}")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _budget().count()
        value, *rest_args = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if name == "format":
            _check_operation("%", value, ())
        elif name == "join":
            _check_method(rest_args[0] if rest_args else kwargs.get("d", ""), name, (value,), {})
        else:
            _check_method(value, name, tuple(rest_args), kwargs)
        return function(*args, **kwargs)

    return checked


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


def _no_chance(*_: Any, **__: Any) -> NoReturn:
    raise OverBudget("it draws by chance, and a prompt must be the same each time")


def _clock(day: date | None) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        if day is None:
            raise NoDate
        if len(format) > 1000 or re.search(r"%[^%A-Za-z]*\d{3,}", format):
            raise OverBudget("it writes a date with a width beyond all measure")
        return datetime(day.year, day.month, day.day).strftime(format)

    return strftime_now


TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"
MAX_TEMPLATE_CHARS = 1_000_000
DEFAULT_NAME, TOOL_NAME = "default", "tool_use"

TO_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
PRINTED_PARTS = "{'type': 'text'"
"""What a template writes that takes content for a text, where it is a list of parts."""

Tools = Sequence[dict[str, Any]]


RenderedChat = tuple[str, tuple[tuple[int, int], ...]]
"""A conversation as text, and the places of its `{% generation %}` blocks."""


class TemplateParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a template is compiled of."""

    source: str
    place: str
    """Where it was found, for messages."""
    names: dict[str, Any] = {}
    """Special tokens and arguments."""
    day: date | None = None
    with_tools: str = ""
    """Source of the template for tools, where that is another."""


class ChatTemplate:
    """A compiled template. `render` is pure: same messages, same text."""

    def __init__(self, parts: TemplateParts) -> None:
        """Raises ModelError for one that does not compile."""
        self.parts, self.place = parts, parts.place
        self._plain = _Compiled(parts.source, parts.place, parts.day)
        self._with_tools = _Compiled(parts.with_tools, parts.place, parts.day) if parts.with_tools else self._plain

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = (), goes_on: bool = False
    ) -> str:
        """Text of a conversation. `goes_on`: the last message is the beginning of a turn, which is left open. Raises
        DataError when the template refuses it, TemplateError when it asks for a date that the run file has not."""
        if goes_on:
            return self._left_open(messages, tools)
        return self.write(messages, add_generation_prompt=add_generation_prompt, tools=tools)[0]

    def write(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Tools = ()
    ) -> RenderedChat:
        """The same, with the places of what the template calls the model's."""
        compiled = self._with_tools if tools else self._plain
        self._check_thinking(messages, compiled)
        has_parts = any(message.parts for message in messages)
        try:
            written = self._run(compiled, _message_tables(messages), add_generation_prompt, tools)
            if not (has_parts and PRINTED_PARTS in written[0]):
                return written
        except DataError:
            if not has_parts:
                raise
        return self._run(compiled, _message_tables(messages, as_text=True), add_generation_prompt, tools)

    def has_blocks(self, tools: Tools = ()) -> bool:
        """Whether there are `{% generation %}` blocks in it."""
        return (self._with_tools if tools else self._plain).has_blocks

    def _left_open(self, messages: Sequence[Message], tools: Tools) -> str:
        compiled = self._with_tools if tools else self._plain
        self._check_thinking(messages, compiled)
        rendered = _message_tables(messages, as_text=True)
        last = rendered[-1].get("content")
        roles = _roles(rendered)
        if not last or "content" not in compiled.source:
            raise self._refusal(roles, "the last message has no content to continue")
        rendered[-1]["content"] = last + TO_CONTINUE
        text, _ = self._run(compiled, rendered, False, tools)
        tag = TO_CONTINUE.strip()
        if last.strip() not in text or tag not in text:
            raise self._refusal(roles, "it changes the last message, which the model is to continue")
        end = text.rindex(tag)
        return text[:end] if text[end:].startswith(TO_CONTINUE) else text[:end].rstrip()

    def _run(self, compiled: _Compiled, messages: list[dict[str, Any]], opens: bool, tools: Tools) -> RenderedChat:
        names = {
            **self.parts.names,
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": opens,
        }
        try:
            text, spans = run(compiled.template, names)
        except NoDate as err:
            raise TemplateError(
                f"the chat template of {self.place} writes today's date (strftime_now)",
                remedy='set data.date = "YYYY-MM-DD", so that a resumed run has the same prompts',
            ) from err
        except (OverBudget, RecursionError, MemoryError) as err:
            raise self._refusal(_roles(messages), f"{err}" or "no memory", remedy="do not use this template") from err
        except jinja2.TemplateError as err:
            raise self._refusal(_roles(messages), str(err)) from err
        except Exception as err:
            raise self._refusal(_roles(messages), f"{err}" if str(err) else type(err).__name__) from err
        return text, tuple(spans)

    def _refusal(self, roles: str, why: str, remedy: str = "") -> DataError:
        return DataError(
            f"the chat template of {self.place} refuses a conversation of roles [{roles}]: {why}",
            remedy=remedy or "use the roles this model was made for, in the order it expects",
        )

    def _check_thinking(self, messages: Sequence[Message], compiled: _Compiled) -> None:
        """Thinking that is given on its own must be looked at."""
        used = [key for message in messages for key in REASONING_KEYS if message.extra.get(key) not in (None, "")]
        if used and not any(key in compiled.source for key in REASONING_KEYS):
            raise DataError(
                f"a message has {used[0]}, which the chat template of {self.place} does not write",
                remedy="put it into content, as the model writes it (<think>...</think>), or leave it out",
            )


class _Compiled:
    def __init__(self, source: str, place: str, day: date | None) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"{place}: the chat template has {len(source)} characters", remedy="use an honest one")
        if source.startswith("\ufeff"):
            raise ModelError(
                f"{place}: the chat template begins with a byte order mark, which every prompt would begin with",
                remedy="save it without the mark (UTF-8, not UTF-8 with BOM)",
            )
        self.source = source
        try:
            self.template = TemplateSandbox(day).from_string(source)
        except Exception as err:  # depth, memory and what the compiler of Python says
            why = str(err) or type(err).__name__
            raise ModelError(f"{place}: the chat template does not compile: {why}", remedy="mend the template") from err
        self.has_blocks = "endgeneration" in source


class PlainText:
    """Used where there is no chat template: texts as they are, one after the other."""

    place = "plain text"

    def has_blocks(self, tools: Tools = ()) -> bool:
        return False

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Tools = (), goes_on: bool = False
    ) -> str:
        return "".join(message.content for message in messages)

    def write(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, tools: Tools = ()
    ) -> RenderedChat:
        return self.render(messages, add_generation_prompt=add_generation_prompt), ()


def _message_tables(messages: Sequence[Message], *, as_text: bool = False) -> list[dict[str, Any]]:
    """What the template is given. Thinking has all of its names, as transformers gives it."""
    tables: list[dict[str, Any]] = []
    for message in messages:
        table = message.as_template_sees()
        if as_text and message.parts:
            table["content"] = message.content
        thinking = next((table[key] for key in REASONING_KEYS if table.get(key) is not None), None)
        if thinking is not None:
            table = {"thinking": thinking, **table, REASONING_KEYS[0]: thinking}
        tables.append(table)
    return tables


def _roles(messages: Sequence[dict[str, Any]]) -> str:
    return ", ".join(message["role"] for message in messages)


class TemplateSettings(Protocol):
    """Keys of the section `[data]`."""

    @property
    def apply_chat_template(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...
    @property
    def date(self) -> str: ...


def template_of(root: Path, data: TemplateSettings | None, hf_tokenizer: Any) -> ChatTemplate | PlainText:
    """How conversations of a run are written, as transformers finds it; None: without arguments. Raises ModelError."""
    if data is not None and not data.apply_chat_template:
        return PlainText()
    arguments = {} if data is None else data.chat_template_kwargs
    day = date.fromisoformat(data.date) if data is not None and data.date else None
    stored: Any = hf_tokenizer.chat_template
    templates = cast("dict[str, Any]", stored) if isinstance(stored, dict) else {DEFAULT_NAME: stored}
    if not any(templates.values()):
        is_of_processor = (root / PROCESSOR_TEMPLATE).exists()
        hint = f"; {PROCESSOR_TEMPLATE} is for processors of images, not for tokenizers" if is_of_processor else ""
        raise ModelError(
            f"{root} has no chat template: neither {TEMPLATE_FILE} nor chat_template in {TOKENIZER_CONFIG}{hint}",
            remedy=f"put the template of the model's chat variant into {root / TEMPLATE_FILE}, "
            "or set data.apply_chat_template = false",
        )
    source, with_tools = templates.get(DEFAULT_NAME), templates.get(TOOL_NAME, "")
    if not isinstance(source, str) or not isinstance(with_tools, str):
        raise ModelError(
            f"{root} has chat templates named {', '.join(sorted(templates))}, and none named {DEFAULT_NAME} is a text",
            remedy=f"put the one that is meant into {root / TEMPLATE_FILE}",
        )
    place = root / (TEMPLATE_FILE if (root / TEMPLATE_FILE).exists() else TOKENIZER_CONFIG)
    names = {**hf_tokenizer.special_tokens_map, **arguments}
    template = ChatTemplate(TemplateParts(source, str(place), names, day, with_tools))
    undeclared = find_undeclared_variables(TemplateSandbox(day).parse(source + with_tools)) if arguments else set[str]()
    for name in arguments.keys() - undeclared:
        if near := nearest(name, undeclared):
            raise ModelError(
                f'{place}: the chat template does not look at "{name}" of chat_template_kwargs, but at "{near}"',
                remedy=f'did you mean "{near}"? Else leave it out',
            )
    return template
