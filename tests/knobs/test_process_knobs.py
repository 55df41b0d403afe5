"""How much a process logs, as a whole and part by part: knobs that every actor's process has."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.decider import news

from myxa.actors.knobs.owner import KnobOwner
from myxa.actors.knobs.process import MODULES, process_knobs
from myxa.actors.telemetry import ReportPace
from myxa.core.knobs import KnobValue

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def levels_as_before() -> Iterator[None]:
    loggers = [logging.getLogger("myxa"), *(logging.getLogger(f"myxa.{name}") for name in MODULES)]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.fixture
def owner() -> KnobOwner:
    return KnobOwner("rollout/0", process_knobs(ReportPace(1.0)))


def turn(owner: KnobOwner, epoch: int, **values: KnobValue) -> str:
    """Why not; empty: it is in force."""
    refusal = owner.judge(values, 0).refusal
    if not refusal:
        owner.take(news(epoch, **values))
    return refusal


def value(owner: KnobOwner, name: str) -> KnobValue:
    return next(state.value for state in owner.sheet().knobs if state.tunable.name == name)


def test_a_part_logs_from_its_own_level_on_and_the_others_from_that_of_the_process(owner, caplog):
    assert not turn(owner, 1, log_level="WARNING", log_modules="transport:DEBUG,sglang : ERROR")
    for name in ("transport", "sglang", "embedded"):
        for level in (logging.DEBUG, logging.WARNING, logging.ERROR):
            logging.getLogger(f"myxa.{name}").log(level, "said")
    seen = [(record.name.removeprefix("myxa."), record.levelname) for record in caplog.records]
    assert [name for name, _ in seen] == ["transport"] * 3 + ["sglang"] + ["embedded"] * 2
    assert ("sglang", "ERROR") in seen
    assert value(owner, "log_modules") == "sglang:ERROR,transport:DEBUG"


def test_what_is_named_no_more_goes_by_the_process_again(owner):
    turn(owner, 1, log_modules="transport:DEBUG")
    turn(owner, 2, log_modules="embedded:ERROR")
    assert value(owner, "log_modules") == "embedded:ERROR"
    turn(owner, 3, log_modules="none")
    assert value(owner, "log_modules") == "none"
    assert logging.getLogger("myxa.transport").level == logging.NOTSET


MISTAKES = {
    "transprot:DEBUG": "did you mean transport?",
    "transport:LOUD": 'transport has no level "LOUD"; write transport:DEBUG',
    "transport": 'transport has no level ""',
    "transport:debug": "one of DEBUG, INFO, WARNING, ERROR",
    ":DEBUG": 'no part is called ""',
}


def test_a_mistake_is_refused_with_what_there_is_and_changes_nothing(owner):
    for epoch, (text, word) in enumerate(MISTAKES.items(), start=1):
        assert word in turn(owner, epoch, log_modules=text)
    assert value(owner, "log_modules") == "none"


def test_the_list_of_parts_is_that_of_the_loggers():
    folders = ("core", "transport", "memory", "algos", "actors", "launch")
    text = "\n".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r'getLogger\("myxa\.(\w+)"\)', text))
    by_file = {"actors"} if re.search(r"getLogger\(__name__\)", text) else set[str]()
    assert named | by_file == set(MODULES)
