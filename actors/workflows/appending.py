"""Can a chat template write a message after a turn of the model, and what does it write between the two?

Found out by words that no template has of itself, in place of the turn's and the messages' texts. Pure: knows a way to
render; must not know tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from ...core.errors import DataError, TemplateError
from ...core.samples import Message

ANSWER = "Myxa5d1fc7e2Answer"
REPLY = "Myxa93b60a5eReply"
QUESTION = Message(role="user", content="?")
ANSWERED = (QUESTION, Message(role="assistant", content=ANSWER))
KNOWN_ROLES = ("user", "tool", "observation", "ipython", "function")
"""What templates call those who speak after the model."""

Render = Callable[[Sequence[Message]], str]
"""A conversation as text, up to where the model begins to speak."""


def between(render: Render, messages: Sequence[Message], place: str) -> str:
    """What stands between a turn of the model and the text of the first of these messages, whatever that is.

    `place`: of the template. Raises TemplateError if it cannot append them, with the roles that it can.
    """
    try:
        return _tried(render, messages, place)
    except TemplateError as err:
        fits = roles_that_fit(render)
        listed = f"; after a turn of the model it appends: {', '.join(fits)}" if fits else ""
        raise TemplateError(err.message, remedy=f"{err.remedy}{listed}") from err


def roles_that_fit(render: Render) -> tuple[str, ...]:
    """Of the known ones."""
    return tuple(role for role in KNOWN_ROLES if _can_append(render, role))


def unfit(messages: Sequence[Message], place: str, how: str) -> TemplateError:
    """The template cannot append them: it does `how`."""
    roles = ", ".join(repr(message.role) for message in messages)
    return TemplateError(
        f"the chat template of {place} cannot append a message of role {roles} after a turn of the model: it {how}",
        remedy="reply in a role that the model was made for, or mend the template",
    )


def _can_append(render: Render, role: str) -> bool:
    try:
        _tried(render, (Message(role=role, content=""),), "")
    except TemplateError:
        return False
    return True


def _tried(render: Render, messages: Sequence[Message], place: str) -> str:
    words = [f"{REPLY}{number}End" for number in range(len(messages))]
    probes = [message.with_text(word) for message, word in zip(messages, words, strict=True)]
    try:
        text = render((*ANSWERED, *probes))
    except DataError as err:
        raise unfit(messages, place, f"refuses it ({err.message})") from err
    if ANSWER not in text:
        raise unfit(messages, place, "changes the model's turn before it")
    if text.count(ANSWER) > 1:
        raise unfit(messages, place, "writes the model's turn before it twice")
    places = [text.find(word) for word in (ANSWER, *words)]
    if -1 in places:
        raise unfit(messages, place, "leaves it out")
    if any(left > right for left, right in pairwise(places)) or any(text.count(word) > 1 for word in words):
        raise unfit(messages, place, "writes it twice, or in another order")
    return text.partition(ANSWER)[2].partition(words[0])[0]
