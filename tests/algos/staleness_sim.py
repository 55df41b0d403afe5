"""A virtual-time model of generation beside training, run through the real admission code.

Answers "what does this eta or policy cost" without a model, an engine or a second of waiting; tests drive the policies
by it. It does not use the buffer. Hand-written: simpy was
considered; one heap and three kinds of event need no process library.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Literal

from myxa.algos.staleness import Admission
from myxa.core.errors import StalenessError

EventKind = Literal["finished", "adopted", "trained"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated. Times are in units of the median reward time of one sample."""

    policy: str = "pace"
    max_staleness: int = 1
    batch_size: int = 32
    num_steps: int = 100
    step_s: float = 10.0
    num_engines: int = 2
    groups_per_engine: int = 1 << 30
    group_size: int = 8
    generate_s: float = 1.0
    sigma: float = 1.0
    """Of the lognormal time of a sample; a group lasts as long as its slowest member."""
    adopt_s: float = 0.5
    """Between the end of a step and the adoption by the last engine, one after another."""
    filter_rate: float = 0.0
    seed: int = 1


@dataclass(slots=True)
class SimOutcome:
    """What happened. Lags per trained group, lengths (time of the slowest member) in order."""

    wall_s: float = 0.0
    waited_s: float = 0.0
    """Time in which the trainer had no batch, the first batch excepted."""
    lags: list[int] = field(default_factory=list[int])
    trained: list[float] = field(default_factory=list[float])
    dropped: list[float] = field(default_factory=list[float])
    drawn: list[float] = field(default_factory=list[float])

    @property
    def waiting_share(self) -> float:
        return self.waited_s / self.wall_s if self.wall_s else 0.0


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.admission = Admission(
            scenario.policy,
            max_staleness=scenario.max_staleness,
            batch_size=scenario.batch_size,
        )
        self.rng = random.Random(scenario.seed)
        self.outcome = SimOutcome()
        self.events: list[tuple[float, int, EventKind, int]] = []
        self.num_events = 0
        self.now_s = 0.0
        self.versions = [0] * scenario.num_engines
        self.running = [0] * scenario.num_engines
        self.engine_of: dict[int, int] = {}
        self.started_at: dict[int, int] = {}
        self.length_of: dict[int, float] = {}
        self.num_drawn = 0
        self.idle_since: float | None = 0.0

    def at(self, delay_s: float, kind: EventKind, subject: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now_s + delay_s, self.num_events, kind, subject))

    def fill(self) -> None:
        """Every engine takes what admission and its room allow, in turn."""
        progress = True
        while progress:
            progress = False
            for engine, version in enumerate(self.versions):
                if self.running[engine] < self.scenario.groups_per_engine and self.admission.may_dispatch(version):
                    self.dispatch(engine)
                    progress = True

    def dispatch(self, engine: int) -> None:
        group, self.num_drawn = self.num_drawn, self.num_drawn + 1
        slowest = max(self.rng.lognormvariate(0.0, self.scenario.sigma) for _ in range(self.scenario.group_size))
        self.engine_of[group], self.started_at[group] = engine, self.versions[engine]
        self.length_of[group] = slowest
        self.outcome.drawn.append(slowest)
        self.running[engine] += 1
        self.admission.dispatched(group, self.versions[engine])
        self.at(self.scenario.generate_s + slowest, "finished", group)

    def finished(self, group: int) -> None:
        self.running[self.engine_of.pop(group)] -= 1
        if group not in self.length_of:
            return  # dropped while under way
        if self.rng.random() < self.scenario.filter_rate:
            self.admission.filtered(group)
        else:
            self.admission.ready(group, self.started_at[group])

    def train(self) -> None:
        step = self.admission.next_step
        if self.idle_since is None or step >= self.scenario.num_steps:
            return
        selection = self.admission.select(step)
        self.outcome.dropped.extend(self.length_of.pop(group_id) for group_id in selection.overdue)
        if selection.claim is None:
            return
        self.outcome.lags.extend(step - self.started_at[group] for group in selection.claim)
        self.outcome.trained.extend(self.length_of[group] for group in selection.claim)
        self.outcome.waited_s += self.now_s - self.idle_since if step else 0.0
        self.idle_since = None
        self.at(self.scenario.step_s, "trained", step)

    def trained(self, step: int) -> None:
        self.admission.trained(step)
        self.idle_since = self.now_s
        for engine in range(self.scenario.num_engines):
            self.at(self.scenario.adopt_s * (engine + 1) / self.scenario.num_engines, "adopted", engine)

    def run(self) -> SimOutcome:
        self.fill()
        while self.admission.newest_version < self.scenario.num_steps:
            if not self.events:
                raise StalenessError(f"nothing will ever happen again before step {self.admission.next_step}: deadlock")
            self.now_s, _, kind, subject = heapq.heappop(self.events)
            if kind == "finished":
                self.finished(subject)
            elif kind == "trained":
                self.trained(subject)
            else:
                self.versions[subject] = min(self.versions[subject] + 1, self.admission.newest_version)
            self.train()
            self.fill()
        self.outcome.wall_s = self.now_s
        return self.outcome


def simulate(scenario: Scenario) -> SimOutcome:
    """Run the scenario to its last step. Raises StalenessError if the policy deadlocks or breaks its bound."""
    return _Simulation(scenario).run()
