"""What the buffer decides, without waiting, and writes: ledger, admission and prompt source in step.

Every method is one event. The ledger is written first, and admission follows. An error of the ledger's file ends this
object: the next one is made from what the file has.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec
import numpy as np
from msgspec.structs import replace

from ...algos.staleness import LineEntry, LineStage
from ...core.errors import DataError, LedgerError
from ...core.files import Tell
from ...core.knobs import KnobValue
from ...core.messages import Assignment, BufferStats, DrawBlock, DrawRequest, GroupDropped, GroupReturned, PutResult
from ...core.protocols import PromptData
from ...core.samples import NO_VERSION, Group, Prompt, Sample
from ...core.timeouts import TIMEOUTS
from ..ledger.file import LEFTOVER, OPEN, STALE, Row, State, encode
from ..weights.engine_versions import EngineVersions, JudgedVersion, Rewind, ServedWeights
from .cursor import POISON, PoisonTracker, PromptCursor, Quarantine, Sources
from .filters import ALL_MASKED, GroupFilters, is_all_masked, mask_members
from .finished_groups import INVALID, FinishedGroups, num_tokens_of, wrong_in_group, wrong_in_partial
from .knobs import BufferKnobs, BufferLimits

NUM_BATCHES = 20
"""A complaint is due after so many batches' worth of groups."""
UNUSABLE = "prompt-too-long"
REMEDIES = {
    "zero_variance": "all samples of each group got the same reward: the task is too hard or too easy, or the reward "
    "is constant"
}
OTHER_REMEDY = "the events of kind group-dropped, the ledger and the actors' logs say more"
_MAX_REASONS = 8
_REWINDS = "rewinds"
_STAGES = {State.DISPATCHED: LineStage.UNDER_WAY, State.REQUEUED: LineStage.WAITING, State.READY: LineStage.READY}


@dataclass(eq=False)
class Groups:
    """Who works on which, what becomes of each. Raises LedgerError, DataError, UserCodeError."""

    source: PromptData
    knobs: BufferKnobs
    filters: GroupFilters
    limits: BufferLimits
    _: KW_ONLY
    finished: FinishedGroups
    """Gets what is known of finished groups."""
    tell: Tell
    """Gets the events of groups and prompts."""
    log: logging.Logger
    started_s: float

    def __post_init__(self) -> None:
        self.ledger = ledger = self.knobs.ledger
        self.admission = self.knobs.admission
        self.versions = EngineVersions(msgspec.json.decode(ledger.recall(_REWINDS) or "[]", type=tuple[Rewind, ...]))
        sources = Sources(self.source)
        quarantine = Quarantine(sources, ledger, self.limits.quarantine_after, self.tell)
        self.cursor = PromptCursor(sources, ledger, quarantine, self.tell)
        self.cursor.use(self.knobs.values.mix, self.knobs.values.difficulty)
        self.poison = PoisonTracker(ledger, self.limits.max_deaths, self.tell)
        self.shares = FairShare()
        self.starvation = StarvationCheck(self.admission.batch_size, self.tell)
        self.is_finished = False
        """No batch will ever come again."""
        self._masked: Counter[str] = Counter()
        """Reason -> members, of groups that were kept since the buffer started, from which nothing is learnt."""
        self._reattach_until_s = self.started_s + TIMEOUTS.buffer.reattach_s
        self._restore_line()

    def _restore_line(self) -> None:
        """Admission from the ledger: at the start, and after a rewind."""
        ledger = self.ledger
        places = [
            LineEntry(row.group_id, row.version, _STAGES.get(row.state, LineStage.TAKEN)) for row in ledger.line()
        ]
        self._drop_overdue(
            self.admission.restore(places, next_step=ledger.next_step, newest_version=ledger.newest_version)
        )

    # ---- handing out

    def note_report(self, request: DrawRequest) -> None:
        """What an actor reports in a draw: incarnation, weights that its engine serves, groups that it holds."""
        weights = ServedWeights(request.lineage, request.version)
        self.versions.reported(request.rollout, request.epoch, weights)
        owned, holding = self._owned_by(request.rollout), request.holding
        self._died([row for row in owned if row.epoch < request.epoch], f"{request.rollout} restarted")
        if holding is None:
            return
        rows = [row for row in owned if row.epoch == request.epoch]
        self._requeue([row for row in rows if row.group_id not in holding], f"{request.rollout} does not have it")
        reattached = [row for row in rows if row.group_id in holding and row.state is State.REQUEUED]
        self.ledger.reattach([row.group_id for row in reattached])
        for row in reattached:
            self.admission.dispatched(row.group_id, row.version)

    def draw(self, request: DrawRequest, now_s: float) -> tuple[list[Assignment], DrawBlock]:
        """Groups for the engine that asks: first what was handed back, then new draws. Or why there are none."""
        self.cursor.is_searching = False  # no search while nothing is given
        if self.is_finished:
            return [], "finished"
        if not self.knobs.serves(self.ledger.next_step):
            return [], "paused"
        announced = ServedWeights(request.lineage, request.version)
        newest = self.admission.newest_version
        served = self.versions.serving(request.rollout, request.epoch, announced, newest)
        waiting, max_groups = self._turn(request, served.version, now_s)
        if assignments := self._dispatch(request, served, waiting, max_groups):
            self.shares.leaves(request.rollout)
            num_tokens = {work.prompt.group_id: num_tokens_of(work.partial) for work in assignments}
            self.poison.note_dispatched((request.rollout, request.epoch), num_tokens, now_s)
            return assignments, ""
        if not request.max_groups:
            return [], ""
        if not max_groups:
            return [], "suspect"
        if not self.cursor.has_next:
            handed_back = self._handed_back(request, now_s)
            if not handed_back:
                return [], "data-exhausted"
            if not waiting and self._dispatchable(handed_back, served.version):  # for others: its engine is in doubt
                return [], "suspect"
        return [], "weights" if served.version < newest and self.admission.may_dispatch(newest) else "staleness"

    def _dispatch(
        self, request: DrawRequest, served: JudgedVersion, waiting: list[Row], max_groups: int
    ) -> list[Assignment]:
        assignments: list[Assignment] = []
        version, is_undone = served.version, served.is_undone
        if not waiting and not self.admission.may_dispatch(version):  # most looks of draws that wait
            return assignments
        owner = {"rollout": request.rollout, "epoch": request.epoch}
        with self.ledger.together():
            for row in waiting:
                if len(assignments) < max_groups and self.admission.may_dispatch(version, row.group_id):
                    prompt, partial = self.cursor.sources.prompt(row), self.ledger.partial(row.group_id)
                    self.admission.dispatched(row.group_id, version, is_undone=is_undone)
                    version_of_group = self.admission.version_of(row.group_id)
                    (row,) = self.ledger.dispatch([replace(row, version=version_of_group, **owner)])
                    assignments.append(self._assignment(row, prompt, partial))
            num_groups = len(assignments) + min(max_groups - len(assignments), self._num_new(request))
            while len(assignments) < num_groups and self.admission.may_dispatch(version):
                drawn = self.cursor.draw(
                    self.knobs.values.num_samples,
                    version=min(version, self.admission.newest_version),
                    terms=self.ledger.number_terms(self.knobs.terms),
                    **owner,
                )
                if drawn is None:
                    break
                self.admission.dispatched(drawn[0].group_id, version, is_undone=is_undone)
                assignments.append(self._assignment(*drawn))
        return assignments

    def _assignment(self, row: Row, prompt: Prompt, partial: tuple[Sample, ...] = ()) -> Assignment:
        terms = self.ledger.terms_of(row)
        return Assignment(
            prompt=prompt,
            attempt=row.attempt,
            num_samples=row.num_samples,
            sampling=terms.sampling,
            partial=partial,
            knobs=terms.knobs,
        )

    def waits(self, request: DrawRequest, blocked_by: DrawBlock) -> None:
        is_suspect = blocked_by == "suspect"  # it gets nothing new, however much there is
        self.shares.waits(request.rollout, 0 if is_suspect else request.room or request.max_groups)

    def _turn(self, request: DrawRequest, version: int, now_s: float) -> tuple[list[Row], int]:
        """Groups handed back that this actor may get, and how many groups in all."""
        rollout, rows = request.rollout, self._handed_back(request, now_s)
        if not self.poison:  # every look of every draw that waits comes by here
            return rows, request.max_groups
        waiting = {row.group_id: row for row in self._dispatchable(rows, version)}
        holding = {row.group_id for row in self._owned_by(rollout) if row.state is State.DISPATCHED}
        holding.update(request.holding or ())
        actor = (rollout, request.epoch)
        allowed, max_groups = self.poison.turn(actor, holding, list(waiting), request.max_groups, now_s)
        return [waiting[group_id] for group_id in allowed], max_groups

    def _num_new(self, request: DrawRequest) -> int:
        """Groups that this actor may begin beside the reserved shares of others. Admission bounds the sum of all."""
        num_free = max(0, self.admission.slots_total - self.admission.slots_used)
        return self.shares.limit(request.rollout, request.room or request.max_groups, num_free, self.ledger.running)

    def _dispatchable(self, rows: list[Row], version: int) -> list[Row]:
        return [row for row in rows if self.admission.may_dispatch(version, row.group_id)]

    def _handed_back(self, request: DrawRequest, now_s: float) -> list[Row]:
        """Groups that are not kept for another actor, which may run them still."""
        rows, is_late = self.ledger.rows(State.REQUEUED), now_s >= self._reattach_until_s
        return [row for row in rows if is_late or row.rollout in ("", request.rollout)]

    # ---- taking back

    def put(self, group: Group, attempt: int, rollout: str) -> tuple[PutResult, Group]:
        """A finished group as it is kept: members may be masked. Heard only of the attempt and actor that have it."""
        group_id, num_tokens = group.group_id, num_tokens_of(group.samples)
        row = self.ledger.find(group_id)
        if row is None:
            return PutResult(outcome="stale-attempt", reason=f"group {group_id} was never drawn"), group
        if (row.attempt, row.rollout) != (attempt, rollout) or row.state not in (State.DISPATCHED, State.REQUEUED):
            return self._answer_again(row, num_tokens, (attempt, rollout)), group
        self.poison.note_finished((rollout, row.epoch), group_id)
        stored, payload, note, masked = group, b"", "", dict[str, int]()
        detail = wrong_in_group(group, self.cursor.sources.prompt(row), row.num_samples) or ""
        reason = INVALID if detail else self.filters.by_name[self.knobs.values.group_filter](group)
        if detail:
            self.log.warning("group %d of %s is dropped: %s", group_id, rollout, detail)
        if reason is None:
            stored, masked = mask_members(group, self.filters.of_samples)
            note = ", ".join(f"{why} {count}" for why, count in masked.items())
            reason = ALL_MASKED if masked and is_all_masked(stored) else None
        if reason is None:
            try:
                payload = encode(stored)
            except ValueError as error:
                reason, detail = INVALID, str(error)
        reward = None if reason == INVALID else float(group.rollout_rewards().mean(dtype=np.float64))
        if reason is None:
            stamp = stored.oldest_version()
            version = row.version if stamp == NO_VERSION else self.admission.counted(group_id, stamp)
            self.ledger.finish(group_id, payload, version=version, num_tokens=num_tokens, reward=reward)
            self._masked.update(masked)
            self.admission.ready(group_id, version)
            self.starvation.note_kept()
        else:
            detail = detail or note
            self.ledger.refuse(group_id, reason, detail=detail, num_tokens=num_tokens, reward=reward)
            self.admission.filtered(group_id)
            self.starvation.note_left_out(reason, detail)
        if reward is not None:
            self.cursor.note_reward(row, reward)
            self.finished.add(row.source, group, reward, is_left_out=reason is not None)
        if reason is None:
            return PutResult(outcome="ready"), stored
        return PutResult(outcome="filtered", reason=detail or reason), group

    def _answer_again(self, row: Row, num_tokens: int, sender: tuple[int, str]) -> PutResult:
        if row.state is State.DROPPED and row.num_tokens < 0:
            self.ledger.note_length(row.group_id, num_tokens)
            return PutResult(outcome="stale-attempt", reason=f"was dropped meanwhile: {row.reason}")
        if sender == (row.attempt, row.rollout):
            return PutResult(outcome="duplicate", reason=f"is {row.state}")
        return PutResult(outcome="stale-attempt", reason=f"is {row.state} in attempt {row.attempt} of {row.rollout!r}")

    def give_up(self, dropped: GroupDropped) -> bool:
        """A rollout actor gives a group up; False if it is not (any more) its to give up."""
        row = self._row_held(dropped.group_id, dropped.attempt, dropped.rollout)
        if row is not None:
            self._give_up(row, dropped.reason, dropped.detail)
        return row is not None

    def _give_up(self, row: Row, reason: str, detail: str) -> None:
        self.ledger.drop([(row.group_id, reason)], detail)
        self.admission.filtered(row.group_id)
        self.poison.forget(row.group_id)
        self.starvation.note_left_out(reason, detail)
        self.cursor.quarantine.note_failure(self.cursor.sources.prompt(row), reason, detail)

    def take_back(self, returned: GroupReturned, now_s: float) -> bool:
        """An actor returns a group with its tokens, or reports them and keeps it; False: it has it no more."""
        group_id, rollout, partial = returned.group_id, returned.rollout, returned.partial
        row = self._row_held(group_id, returned.attempt, rollout)
        if row is None:
            return False
        fault = wrong_in_partial(partial, group_id, row.num_samples)
        if returned.goes_on:
            if is_saved := bool(partial) and fault is None:
                self.ledger.save_partial(group_id, encode(partial))
                self.poison.has_tokens(group_id, num_tokens_of(partial))
            return is_saved
        if fault is not None:
            self.log.warning("group %d of %s starts again from its prompt: %s", group_id, rollout, fault)
            partial = ()
        self.poison.has_tokens(group_id, num_tokens_of(partial))
        if returned.has_died:
            self.poison.note_broken_engine((rollout, row.epoch), now_s)
        give_back = self._died if returned.has_died else self._requeue
        give_back([row], f"handed back by {rollout}", partial)
        return True

    def forget_actor(self, rollout: str, epoch: int) -> int:
        """An incarnation (and every older one) of a rollout actor ended; returns how many groups it had."""
        self.shares.leaves(rollout)
        rows = [row for row in self._owned_by(rollout) if row.epoch <= epoch]
        self._died(rows, f"{rollout} (epoch {epoch}) is gone")
        return len(rows)

    def _died(self, rows: list[Row], detail: str, partial: tuple[Sample, ...] = ()) -> None:
        """Their actor or engine ended while it held them. If the buffer restarted meanwhile, that does not count."""
        self._requeue(rows, detail, partial)
        dispatched = {row.group_id: row for row in rows if row.state is State.DISPATCHED}
        for group_id in self.poison.note_deaths(
            {row.group_id: (row.rollout, row.epoch) for row in dispatched.values()}
        ):
            self._give_up(dispatched[group_id], POISON, self.poison.why())

    def _requeue(self, rows: list[Row], detail: str, partial: tuple[Sample, ...] = ()) -> None:
        data = encode(partial) if partial else None
        oldest: dict[int, int] = {}
        for row in rows:
            versions = (sample.oldest_version() for sample in partial or self.ledger.partial(row.group_id))
            stamp = min((version for version in versions if version >= 0), default=NO_VERSION)
            oldest[row.group_id] = self.admission.counted(row.group_id, stamp)
        self.ledger.requeue([(group_id, data, version) for group_id, version in oldest.items()], detail)
        for group_id, version in oldest.items():
            self.admission.requeued(group_id, version)

    def _owned_by(self, rollout: str) -> list[Row]:
        return sorted(self.ledger.held_by(rollout), key=lambda row: row.group_id)

    def _row_held(self, group_id: int, attempt: int, rollout: str) -> Row | None:
        row = self.ledger.find(group_id)
        if row is None or row.state not in (State.DISPATCHED, State.REQUEUED):
            return None
        return row if (row.attempt, row.rollout) == (attempt, rollout) else None

    # ---- training

    def claim(self, step: int) -> dict[int, int]:
        """The batch of `step`: group -> version of its oldest token; empty as yet, or (`is_finished`) for ever."""
        ledger = self.ledger
        if rows := ledger.claim_of(step):
            return {row.group_id: row.version for row in rows}
        if step != ledger.next_step:
            raise LedgerError(
                f"step {step} asks for a batch, but the next step is {ledger.next_step}",
                remedy="a trainer that starts from a checkpoint first calls rewind with its version",
            )
        if self.is_finished:
            return {}
        selection = self.admission.select(step)
        self._drop_overdue(selection.overdue)
        if selection.claim is not None:
            ledger.claim(step, selection.claim)
            return {row.group_id: row.version for row in ledger.claim_of(step)}
        if self.admission.num_open < self.admission.batch_size and not self.cursor.has_next:
            leftovers = ledger.rows(*OPEN)
            ledger.drop([(row.group_id, LEFTOVER) for row in leftovers], "no whole batch can be formed any more")
            for row in leftovers:
                self.admission.filtered(row.group_id)
            self.is_finished = True
        return {}

    def trained(self, step: int) -> bool:
        """The batch of `step` was trained; False if that was known."""
        is_new = self.ledger.trained(step)
        if is_new:
            self.admission.trained(step)
        return is_new

    def rewind(self, version: int, lineage: int) -> int:
        """Training continues from `version`, with a leader of that epoch; returns how many groups are READY again."""
        num_ready = self.ledger.rewind(version)
        self.is_finished = False
        self._restore_line()
        self.versions.rewound(version, lineage)
        self.ledger.remember(_REWINDS, msgspec.json.encode(self.versions.rewinds).decode())
        return num_ready

    def retune(self, values: Mapping[str, KnobValue], epoch: int) -> int:
        """Other values of knobs from now on; returns how many groups had to be dropped for them."""
        overdue = self.knobs.change(values, epoch)
        self.cursor.use(self.knobs.values.mix, self.knobs.values.difficulty)
        self._drop_overdue(overdue)
        return len(overdue)

    def _drop_overdue(self, overdue: tuple[int, ...]) -> None:
        self.ledger.drop([(group_id, STALE) for group_id in overdue])
        for group_id in overdue:
            self.poison.forget(group_id)

    # ---- for people

    def stats(self) -> BufferStats:
        tally, states = self.ledger.tally, self.ledger.tally.states
        return BufferStats(
            states=states,
            drawn=self.ledger.draws.next_draw,
            trained=states.get(State.TRAINED, 0) + states.get(State.DURABLE, 0),
            dropped=tally.dropped,
            slots_total=self.admission.slots_total,
            slots_used=self.admission.slots_used,
            max_staleness=self.admission.max_staleness,
            policy=self.admission.policy,
            mean_tokens=tally.mean_tokens,
            complaint=self.starvation.complaint,
            next_step=self.ledger.next_step,
        )

    def gauges(self) -> dict[str, float]:
        stats = self.stats()
        values = {
            "buffer/ready": float(self.admission.num_ready),
            "buffer/under_way": float(stats.states.get(State.DISPATCHED, 0)),
            "buffer/requeued": float(stats.states.get(State.REQUEUED, 0)),
            "buffer/slots_used": float(stats.slots_used),
            "buffer/slots_total": float(stats.slots_total),
            "buffer/drawn": float(stats.drawn),
            "buffer/quarantined": float(len(self.cursor.quarantine)),
        }
        if self.cursor.chooses:
            values |= self._gauges_of_sources()
        values |= self.finished.newest()
        values |= {f"buffer/masked/{reason}": float(count) for reason, count in self._masked.items()}
        values |= {f"buffer/dropped/{reason}": float(count) for reason, count in stats.dropped.items()}
        return values | {f"buffer/mean_tokens/{name}": mean for name, mean in stats.mean_tokens.items()}

    def _gauges_of_sources(self) -> dict[str, float]:
        draws, values = self.ledger.draws, dict[str, float]()
        total = draws.in_stretch.total()
        for name in self.cursor.sources.names:
            values[f"buffer/source/{name}/drawn"] = float(draws.taken[name])
            values[f"buffer/source/{name}/share"] = draws.in_stretch[name] / total if total else 0.0
            if (reward := self.finished.mean_of_source(name)) is not None:
                values[f"buffer/source/{name}/reward"] = reward
        return values

    def inventory(self) -> str:
        dropped = self.ledger.tally.dropped
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        left_out = f", {sum(dropped.values())} groups left out ({reasons})" if dropped else ""
        return f"{self.ledger.draws.next_draw} prompts drawn{left_out}"


class StarvationCheck:
    """Counts groups in a row that gave nothing to train on: says when a person must hear of it, and when to give up. A
    run whose groups are all left out would generate for ever and only look slow. It is not stopped: a model may yet
    learn to solve a task. Prompts that cannot be used at all are another matter: training makes them no shorter."""

    def __init__(self, batch_size: int, tell: Tell) -> None:
        self._tell = tell
        self._limit = NUM_BATCHES * batch_size
        self._reasons: Counter[str] = Counter()
        self._last_detail = ""
        self._tell_at = self._limit

    def note_kept(self) -> None:
        self._reasons.clear()
        self._tell_at = self._limit

    def note_left_out(self, reason: str, detail: str = "") -> None:
        is_known = reason in self._reasons or len(self._reasons) < _MAX_REASONS
        self._reasons[reason if is_known else "other"] += 1
        self._last_detail = detail
        if self._reasons.total() >= self._tell_at:  # at the limit, then whenever the number has doubled
            self._tell_at = 2 * self._reasons.total()
            self._tell("all-left-out", self.complaint)

    @property
    def complaint(self) -> str:
        """Empty, or what a person should know now."""
        num = self._reasons.total()
        if num < self._limit:
            return ""
        counts = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
        remedy = REMEDIES.get(self._reasons.most_common(1)[0][0], OTHER_REMEDY)
        return f"the last {num} groups in a row were all left out ({counts}) -- {remedy}"

    @property
    def verdict(self) -> DataError | None:
        num = self._reasons.total()
        if num < self._limit or set(self._reasons) != {UNUSABLE}:
            return None
        return DataError(f"none of the last {num} prompts could be used; the last one: {self._last_detail}")


class FairShare:
    """How many new groups each rollout actor may take while others wait for some too. Pure.

    Slots come back a whole step at a time, and to the engine that adopts the step's weights first; where it has room
    for all of them, the others would get none, step after step. So as many are kept for each actor that waits as bring
    all actors to the same number of groups that they run. A quicker actor still does more, for its groups are finished
    sooner. An engine that does not follow the weights is fenced, and waits no more."""

    def __init__(self) -> None:
        self._rooms: dict[str, int] = {}
        """Actor whose draw is held -> groups that it could take."""

    def waits(self, rollout: str, room: int) -> None:
        """Its draw is held until there is something for it."""
        self._rooms[rollout] = room

    def leaves(self, rollout: str) -> None:
        self._rooms.pop(rollout, None)

    def limit(self, rollout: str, room: int, num_free: int, running: Mapping[str, int]) -> int:
        """How many of `num_free` `rollout` may take, which has `room`. `running`: groups that each actor runs."""
        if num_free < 1:
            return num_free
        waiting = Counter(
            (running.get(name, 0), room) for name, room in self._rooms.items() if room and name != rollout
        )
        level = _level(waiting + Counter([(running.get(rollout, 0), room)]), num_free)
        return num_free - sum(count * _fill(*demand, level) for demand, count in waiting.items())


def _fill(running: int, room: int, level: int) -> int:
    return min(room, max(0, level - running))


def _level(demands: Counter[tuple[int, int]], num_free: int) -> int:
    """The highest level to which `num_free` groups bring all actors; what they leave over is for the first to come.
    `demands`: (groups that it runs, room) -> actors."""

    def num_needed(level: int) -> int:
        return sum(count * _fill(running, room, level) for (running, room), count in demands.items())

    return bisect_right(range(max(running for running, _ in demands) + num_free + 1), num_free, key=num_needed) - 1
