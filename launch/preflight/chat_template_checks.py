"""Checks that the model's chat template can render what the run needs: a question, more turns, the first rows of data.

Demonstrations are rendered as they are trained on. The buffer checks every row when it starts, and the rollout actors
check every prompt that they draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ...actors.data.data_files import check_data_files, is_large, needs_pyarrow, open_rows
from ...actors.data.layout import Item, RowLayout
from ...actors.data.prompts import layout_of
from ...actors.data.row_file import RowError
from ...actors.models.chat_template import template_of
from ...actors.models.tokenizer import FolderTokenizer, load_tokenizer
from ...actors.workflows.demonstrated import demonstrate
from ...actors.workflows.named import shown_turns
from ...actors.workflows.turn_renderer import TurnRenderer, roles_that_fit
from ...core.config import RunConfig
from ...core.config.data import Source, parse_sources
from ...core.errors import DataError, ModelError, MyxaError, TemplateError
from ...core.samples import Message, Prompt
from .finding import ConfigFinding
from .interpreters import has_module

ASKED = "Myxa7c1e04b9Question"
"""What no template writes by itself."""


def template_findings(config: RunConfig) -> Iterator[ConfigFinding]:
    """A template that is missing, refuses a question or leaves it out, or cannot append to a turn where the run has
    several."""
    try:
        template = template_of(config.model.path, config.data)
    except MyxaError as error:
        yield ConfigFinding("model.path", error)
        return
    render = partial(template.render, add_generation_prompt=True)
    try:
        trouble = _trouble(render)
    except TemplateError as error:  # the template asks for a date
        yield ConfigFinding("data.date", error)
        return
    if trouble:
        error = TemplateError(f"the chat template of {template.place} {trouble}", remedy="mend the template")
        yield ConfigFinding("model.path", error)
    elif config.rollout.max_turns > 1 and not roles_that_fit(render):
        error = TemplateError(
            f"rollout.max_turns = {config.rollout.max_turns}: the chat template of {template.place} cannot append a "
            "message of any role that is known after a turn of the model",
            remedy="mend the template, or set rollout.max_turns = 1",
        )
        yield ConfigFinding("rollout.max_turns", error)


def _trouble(render: partial[str]) -> str:
    try:
        text = render((Message(role="user", content=ASKED),))
    except DataError as error:
        return f"refuses a question: {error.message}"
    return "" if ASKED in text else f"leaves out what the user says: of a question it writes {text[:80]!r}"


NUM_ROWS = 8
MAX_BYTES = 64 << 20
"""A larger JSONL file is not indexed for this."""


def row_findings(config: RunConfig) -> Iterator[ConfigFinding]:
    """The first row of each source that the template refuses. Other checks find other faults of model and data."""
    if any(not finding.is_warning for finding in template_findings(config)):
        return
    try:
        tokenizer = load_tokenizer(config.model.path, template_of(config.model.path, config.data))
    except MyxaError:
        return
    renderer = TurnRenderer(tokenizer)
    yield from _end_findings(tokenizer, renderer)
    write = partial(_write, tokenizer, renderer, is_learnt=config.algo.kind == "sft")
    for name, part in config.data.parts().items():
        key, layout = config.data.key_of(name), layout_of(config, part, config.reward, name)
        for source in () if layout.is_recorded else parse_sources(part.train):
            yield from _findings(source, layout, key, write, skips_bad=part.on_bad_line == "skip")


def _end_findings(tokenizer: FolderTokenizer, renderer: TurnRenderer) -> Iterator[ConfigFinding]:
    """A template for chats on a base model, whose answers would not stop at the end of the turn."""
    try:
        mark = renderer.end_mark()
    except MyxaError:  # a finding of the template itself
        return
    if mark is None or mark in tokenizer.eos_token_ids:
        return
    error = ModelError(
        f"the chat template of {tokenizer.template_place} ends turns with "
        f"{tokenizer.decode([mark], skip_special=False)!r} (token {mark}), which is no end token of the model: "
        "no answer ends there",
        remedy="add it to eos_token_id of generation_config.json",
    )
    yield ConfigFinding("model.path", error, is_warning=True)


def _findings(
    source: Source, layout: RowLayout, key: str, write: Callable[[int, Item], None], *, skips_bad: bool
) -> Iterator[ConfigFinding]:
    try:
        check_data_files(source.path, key)
        if is_large(source.path, key, MAX_BYTES) or (needs_pyarrow(source.path) and not has_module("pyarrow")):
            return
        file = open_rows(source.path, layout, key)
        rows = source.rows(file.num_rows)[:NUM_ROWS]
    except (MyxaError, OSError, ImportError):
        return
    for row in rows:
        try:
            write(row, layout.item(file.read(row)))
        except RowError:
            return
        except MyxaError as error:
            named = type(error)(f"{file.place(row)}: {error.message}", remedy=error.remedy)
            yield ConfigFinding(key, named, is_warning=skips_bad and isinstance(error, DataError))
            return


def _write(tokenizer: FolderTokenizer, renderer: TurnRenderer, row: int, item: Item, *, is_learnt: bool) -> None:
    prompt = Prompt(group_id=0, row=row, pass_index=0, messages=item.messages, tools=item.tools, metadata=item.metadata)
    renderer.prompt(prompt)
    if is_learnt:
        demonstrate(tokenizer, renderer, prompt.messages, shown_turns(prompt), prompt.tools)
