"""F6: a key of the run file where a knob should be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from myxa.core.config import RunConfig
from myxa.core.errors import ConfigError
from myxa.core.knobs import KnobSheet, KnobState, KnobTable, Tunable
from myxa.launch.control.handlers import check_names
from myxa.launch.run_dir import RunDir


def knob_of(name: str, key: str) -> KnobTable:
    tunable = Tunable(name=name, kind="int", boundary="now", owner="x", help="", key=key)
    state = KnobState(tunable=tunable, value=1, first=1)
    return KnobTable(epoch=0, sheets=(KnobSheet(owner="x", knobs=(state,)),))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("batch_size", "'batch_size' is no knob: it is algo.batch_size of the run file, and fixed while a run works"),
        ("algo.batch_size", "it is algo.batch_size of the run file"),
        ("seed", "run.seed"),
        ("max_groups", "the knob is 'concurrency'"),
        ("concurency", 'did you mean "concurrency"'),
    ],
)
def test_f6_a_key_that_is_no_knob_is_told_with_the_way_to_change_it(name: str, says: str) -> None:
    config = RunConfig.model_validate({"model": {"path": "m"}, "data": {"train": "t"}})
    room: Any = SimpleNamespace(config=config, run_dir=RunDir(Path("runs/sort-1")))
    with pytest.raises(ConfigError) as told:
        check_names((name,), knob_of("concurrency", "rollout.max_groups"), room)
    assert says in str(told.value)
    if "no knob: it is algo" in says:
        assert "`myxa resume runs/sort-1 --set algo.batch_size=...`" in told.value.remedy
