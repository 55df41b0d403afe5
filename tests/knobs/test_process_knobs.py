"""How much a process logs: a knob that every actor's process has."""

from __future__ import annotations

import logging

from tests.harness.decider import news

from myxa.actors.knobs.owner import KnobOwner
from myxa.actors.knobs.process import process_knobs
from myxa.actors.telemetry import ReportPace


def test_a_process_logs_from_its_level_on_and_other_packages_from_theirs(caplog) -> None:
    owner, before = KnobOwner("rollout/0", process_knobs(ReportPace(1.0))), logging.getLogger("myxa").level
    try:
        owner.take(news(1, log_level="ERROR"))
        for name in ("myxa.transport", "other"):
            logging.getLogger(name).warning("said")
        assert [record.name for record in caplog.records] == ["other"]
        assert next(s.value for s in owner.sheet().knobs if s.tunable.name == "log_level") == "ERROR"
    finally:
        logging.getLogger("myxa").setLevel(before)
