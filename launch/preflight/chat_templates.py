"""Whether the model's chat template can write what the run will need of it. Knows templates; starts no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...actors.models.chat_template import template_of
from ...actors.workflows.appending import roles_that_fit
from ...core.config import RunConfig
from ...core.errors import DataError, MyxaError, TemplateError
from ...core.samples import Message
from .finding import ConfigFinding

ASKED = "Myxa7c1e04b9Question"
"""What no template writes by itself."""


def template_findings(config: RunConfig) -> Iterator[ConfigFinding]:
    """A template that is missing, refuses a question or leaves it out, or cannot go on after a turn where the run has
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
