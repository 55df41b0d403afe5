"""A chat template that loops, fills or counts without measure is refused, quickly and in little memory (E10, F7)."""

from __future__ import annotations

import resource
import time

import pytest

from myxa.actors.models.chat_template import ChatTemplate, TemplateParts
from myxa.core.errors import DataError, ModelError
from myxa.core.samples import Message

ASK = [Message(role="user", content="hi")]
HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% set t = 'a' * 99999 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power as text": "{{ (2 ** 4000) ** 4000 }}",
    "product": "{% set ns = namespace(n=3) %}{% for i in range(999) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "repeated text": "{{ ('a' * 10000000000) | length }}",
    "repeated text, turned": "{{ (10000000000 * 'a') | length }}",
    "repeated list": "{{ ([messages] * 10000000000) | length }}",
    "doubled by ~": "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "doubled by +": "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "doubled by output": (
        "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set t %}{{ ns.t }}{{ ns.t }}{% endset %}"
        "{% set ns.t = t %}{% endfor %}"
    ),
    "doubled by join": "{% set ns = namespace(t='ab') %}{% for i in range(60) %}{% set ns.t = [ns.t, ns.t] | join %}{% endfor %}",
    "doubled by replace": "{% set ns = namespace(t='a') %}{% for i in range(60) %}{% set ns.t = ns.t.replace('a', 'aa') %}{% endfor %}",
    "%": "{{ '%10000000000d' % 1 }}",
    "% with *": "{{ '%*d' % (10000000000, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 10000000000) }}",
    "center": "{{ 'a'.center(10000000000) }}",
    "center filter": "{{ 'a' | center(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "indent": "{{ 'a\nb' | indent(10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "tojson": "{{ messages | tojson(indent=10000000000) }}",
    "lipsum": "{{ lipsum(100000000) }}",
    "random": "{{ range(100) | random }}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "attribute": "{{ messages[0].role.upper.__self__.lower() }}",
    "namespace": "{{ namespace(__class__=1) }}",
    "subclasses": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "changes": "{{ messages.append(1) }}",
    "changes a message": "{% for m in messages %}{{ m.pop('role') }}{% endfor %}",
    "refuses": "{{ raise_exception('roles must alternate') }}",
    "no such message": "{{ messages[7]['role'] }}",
    "list": "{{ range(10 ** 9) | list }}",
    "no such method": "{{ messages[0].nothing() }}",
    "text and list": "{{ 'a' + messages }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_e10_a_template_without_measure_is_refused(name: str) -> None:
    import datetime as dt

    started, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate(TemplateParts(HOSTILE[name], "folder/chat_template.jinja", day=dt.date(2026, 1, 1)))
    with pytest.raises(DataError, match=r"chat template of folder/chat_template\.jinja refuses .* roles \[user\]: ."):
        template.render(ASK, add_generation_prompt=True)
    assert time.process_time() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 400 << 10


@pytest.mark.parametrize(
    "source",
    [
        "{% if 1 %}" * 5000 + "x" + "{% endif %}" * 5000,
        "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
        "{% generation %}",
        "{% for %}",
    ],
)
def test_e10_a_template_that_does_not_compile_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate(TemplateParts(source, "here"))


def test_a_long_conversation_is_within_the_limits() -> None:
    source = (
        "{% for m in messages %}{% for c in m.content.split() %}{{ c }}{% endfor %}"
        "{{ m.role ~ ':' ~ m.content + '\\n' }}{% endfor %}"
    )
    talk = [Message(role="user", content="word " * 50) for _ in range(2000)]
    text = ChatTemplate(TemplateParts(source, "here")).render(talk, add_generation_prompt=True)
    assert len(text) == 2000 * (50 * 4 + 6 + 50 * 5)


def test_f7_generation_blocks_are_written_as_their_content() -> None:
    source = "{% for m in messages %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endfor %}"
    written = ChatTemplate(TemplateParts(source, "here")).write([*ASK, *ASK])
    assert written == ("<hi><hi>", ((1, 3), (5, 7)))


def test_a_message_without_measure_is_told_as_the_templates_refusal() -> None:
    source = (
        "{% for m in messages %}{% for a in m.content %}{% for b in m.content %}{% endfor %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match="it takes more than 2000000 steps"):
        ChatTemplate(TemplateParts(source, "here")).render(
            [Message(role="user", content="x" * 9999)], add_generation_prompt=True
        )
