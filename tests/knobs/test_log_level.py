"""How much a process logs: a knob that every owner has."""

from __future__ import annotations

import logging

import pytest
from tests.harness.decider import news

from myxa.actors.coordinator.knob_decisions import Decisions, OwnerStates, draft_change
from myxa.actors.knobs.owner import LOG_LEVEL, KnobOwner
from myxa.core.errors import ConfigError
from myxa.core.knobs import ChangeRequest


def test_a_process_logs_from_its_level_on_and_other_packages_from_theirs(caplog: pytest.LogCaptureFixture) -> None:
    owner, before = KnobOwner("rollout/0", (LOG_LEVEL,)), logging.getLogger("myxa").level
    try:
        owner.take(news(1, log_level="ERROR"))
        for name in ("myxa.transport", "other"):
            logging.getLogger(name).warning("said")
        assert [record.name for record in caplog.records] == ["other"]
        assert [state.value for state in owner.sheet().knobs] == ["ERROR"]
    finally:
        logging.getLogger("myxa").setLevel(before)


def test_all_owners_change_it_or_none() -> None:
    roster = OwnerStates(
        [KnobOwner(name, (LOG_LEVEL,)).sheet() for name in ("buffer", "rollout/0")], {"trainer/0": "gone"}
    )
    with pytest.raises(ConfigError, match="log_level: no answer from trainer/0"):
        draft_change(ChangeRequest(values={"log_level": "DEBUG"}), roster, Decisions("test"))
