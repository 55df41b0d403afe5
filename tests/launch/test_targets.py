"""Which actors a word means, for every verb."""

from __future__ import annotations

import pytest

from myxa.core.errors import ConfigError
from myxa.launch.control.handlers import find_targets
from myxa.launch.views.run_view import ActorFacts

ROSTER = tuple(
    ActorFacts(name=name, role=role, node=node, host="h", state="up", attempt=0)
    for name, role, node in [
        ("buffer", "buffer", 0), ("trainer/0", "trainer", 0), ("rollout/0", "rollout", 0),
        ("rollout/1", "rollout", 1), ("rollout/10", "rollout", 1),
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("rollout", ["rollout/0", "rollout/1", "rollout/10"]),
        ("rollout/*", ["rollout/0", "rollout/1", "rollout/10"]),
        ("rollout/1", ["rollout/1"]),
        (" buffer ", ["buffer"]),
        ("node:1", ["rollout/1", "rollout/10"]),
        ("all", [record.name for record in ROSTER]),
        ("*", [record.name for record in ROSTER]),
    ],
)
def test_words(word: str, names: list[str]):
    assert [record.name for record in find_targets(word, ROSTER)] == names


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("rolout/1", "did you mean 'rollout/1'"),
        ("rolouts", "did you mean 'rollout'"),
        ("node:7", "did you mean 'node:"),
        ("rollout/2", "did you mean 'rollout/"),
        ("", "give a role"),
        ("/" * 5000, "give a role"),
        ("rollout/0; rm -rf", "did you mean 'rollout/0'"),
    ],
)
def test_who_is_not_there_is_an_error_that_says_who_is(word: str, hint: str):
    with pytest.raises(ConfigError, match=hint) as caught:
        find_targets(word, ROSTER)
    assert "there are buffer, trainer/0, rollout/0, rollout/1, rollout/10" in str(caught.value)
    assert len(str(caught.value)) < 400
