"""How long a server may be silent: by the clock, whatever a look costs; and no loss by a clock that jumped."""

from __future__ import annotations

import pytest

from myxa.actors.engines.sglang.http_client import LEAST_LOOK_S, ServerSilence


class Watch:
    """Looks at a server by a clock of its own, as the client does."""

    def __init__(self, bound_s: float = 60.0, every_s: float = 5.0) -> None:
        self.now_s = 100.0
        self.silence = ServerSilence(bound_s, every_s, self.now_s)

    def look(self, *, is_well: bool, costs_s: float | None = None) -> None:
        """`costs_s` None: it hangs as long as it may."""
        self.now_s += self.silence.wait_s(self.now_s)
        may_s = self.silence.look_s(self.now_s)
        self.now_s += may_s if costs_s is None else min(costs_s, may_s)
        self.silence.looked(self.now_s, is_well=is_well)

    def until_over(self, costs_s: float | None) -> float:
        began_s = self.now_s
        while not self.silence.is_over(self.now_s):
            self.look(is_well=False, costs_s=costs_s)
        return self.now_s - began_s


@pytest.mark.parametrize("costs_s", [None, 0.0, 4.0], ids=["hangs", "refuses", "is slow to say no"])
@pytest.mark.parametrize(("bound_s", "every_s"), [(60.0, 5.0), (0.3, 0.1), (5.0, 5.0)])
def test_a_server_is_lost_after_the_bound_whatever_a_look_costs(costs_s, bound_s, every_s):
    watch = Watch(bound_s, every_s)
    for _ in range(3):
        watch.look(is_well=True, costs_s=1.0)
    slack_s = 2 * min(LEAST_LOOK_S, bound_s) + every_s / 10
    assert bound_s <= watch.until_over(costs_s) <= bound_s + slack_s


def test_one_good_answer_begins_anew():
    watch = Watch()
    for _ in range(3):
        watch.look(is_well=False)
    watch.look(is_well=True, costs_s=1.0)
    assert watch.until_over(None) >= 60


def test_an_actor_that_stood_still_itself_looks_again_before_it_judges():
    watch = Watch()
    watch.look(is_well=True, costs_s=1.0)
    watch.now_s += 600.0
    assert not watch.silence.is_over(watch.now_s)
    watch.look(is_well=False, costs_s=0.0)  # an answer that was under way when it stopped
    assert not watch.silence.is_over(watch.now_s)
    watch.look(is_well=True, costs_s=1.0)
    assert watch.silence.lasts_s(watch.now_s) == 0
