"""What the buffer decides, without waiting: the ledger, admission and the prompt source in step.

Every method is one event. The ledger is written first and admission follows; where admission has to answer first
(draw, claim) and the ledger then cannot be written, admission is rebuilt from the ledger.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from ...algos.staleness import Admission, LinePlace, LineStage, Overdue
from ...core.errors import DataError, LedgerError
from ...core.knobs import KnobValue
from ...core.messages import Assignment, BufferStats, DrawBlock, DrawRequest, GroupMeta, GroupReturned, PutResult
from ...core.protocols import MixedSources, PromptSource
from ...core.samples import NO_VERSION, Group, Sample
from ..ledger.ledger import Ledger, masked_text
from ..ledger.states import LEFTOVER, OPEN, Row, State, decode_group, decode_partial, encode
from .cursor import Draft, PromptCursor
from .dispatch_queue import DispatchQueue, FairShare
from .filters import ALL_MASKED, GroupFilters, is_all_masked, mask_members
from .finished_groups import (
    INVALID,
    FinishedGroups,
    mean_reward,
    num_response_tokens,
    num_tokens_of,
    refusal,
    wrong_in_partial,
)
from .knobs import LiveSettings, Terms
from .quarantine import POISON, PoisonTracker, Quarantine

REATTACH_S = 10.0
"""After a restart of the buffer, a group waits so long for the actor that still holds it."""

NUM_BATCHES = 20
"""A complaint is due after so many batches' worth of groups."""
UNUSABLE = "prompt-too-long"
REMEDIES = {
    "zero_variance": "all samples of each group got the same reward: the task is too hard or too easy, or the reward "
    "is constant"
}
OTHER_REMEDY = "the events of kind group-dropped, the ledger and the actors' logs say more"
_MAX_REASONS = 8
_STAGES = {State.DISPATCHED: LineStage.UNDER_WAY, State.REQUEUED: LineStage.WAITING, State.READY: LineStage.READY}


class BufferStore:
    """All state of the buffer. Raises LedgerError, DataError, UserCodeError; never for what a rollout actor sends."""

    def __init__(
        self,
        *,
        source: PromptSource | MixedSources,
        ledger: Ledger,
        admission: Admission,
        settings: LiveSettings,
        filters: GroupFilters,
        log: logging.Logger,
        started_s: float,
        quarantine: Quarantine | None = None,
        max_deaths: int = 3,
    ) -> None:
        """`max_deaths`: of actors, that one group may bring about (`PoisonTracker`)."""
        self.ledger = ledger
        self.admission = admission
        self.settings = settings
        self.payloads = Payloads(ledger)
        self.cursor = PromptCursor(source, ledger, quarantine)
        self.cursor.use(settings.values.mix, settings.values.difficulty)
        self.poison = PoisonTracker(ledger, max_deaths)
        self.shares = FairShare()
        self._queue = DispatchQueue(
            ledger, admission, settings, self.cursor, self.poison, self.shares, started_s + REATTACH_S
        )
        self._filters = filters
        self._log = log
        self.is_finished = False
        """No batch will ever come again."""
        self.starvation = StarvationCheck(admission.batch_size)
        self.finished = FinishedGroups()
        self._rebuild()

    def hear(self, request: DrawRequest) -> None:
        """What a rollout actor reports of itself in a draw: its incarnation, and the groups that it holds."""
        owned, holding = self._owned_by(request.rollout), request.holding
        self._died([row for row in owned if row.epoch < request.epoch], f"{request.rollout} restarted")
        if holding is None:
            return
        now = [row for row in owned if row.epoch == request.epoch]
        self._requeue([row for row in now if row.group_id not in holding], f"{request.rollout} does not have it")
        kept = [row for row in now if row.group_id in holding and row.state is State.REQUEUED]
        if kept:
            self.ledger.reattach([row.group_id for row in kept])
            for row in kept:
                self.admission.dispatched(row.group_id, row.version)

    def draw(self, request: DrawRequest, version: int, now_s: float, *, is_undone: bool = False) -> list[Assignment]:
        """Groups for an engine that serves `version`: first what was handed back, then new draws. `is_undone`: it only
        counts as serving it; see `engine_versions.py`."""
        draft = self.cursor.draft(self.settings.values.num_samples)  # first: no search while nothing is given
        if not self._queue.is_open:
            return []
        again: list[Row] = []
        try:
            waiting, max_groups = self._queue.turn(request, version, now_s)
            for row in waiting:
                if len(again) < max_groups and self.admission.may_dispatch(version, row.group_id):
                    self.admission.dispatched(row.group_id, version, is_undone=is_undone)
                    again.append(row)
            num_new = min(max_groups - len(again), self._queue.num_new(request, now_s))
            while len(draft.prompts) < num_new and self.admission.may_dispatch(version):
                drawn = draft.next() if self._queue.wants_new else None
                if drawn is None:
                    break
                self.admission.dispatched(drawn.group_id, version, is_undone=is_undone)
            given = self._dispatch(again, draft, request, min(version, self.admission.newest_version))
        except BaseException:
            self._rebuild()
            raise
        if given:
            self.shares.served(request.rollout)
        num_tokens = {work.prompt.group_id: num_tokens_of(work.partial) for work in given}
        self.poison.dispatched((request.rollout, request.epoch), num_tokens, now_s)
        return given

    def waits(self, request: DrawRequest, blocked_by: DrawBlock, now_s: float) -> float:
        """That draw is held. When to look again even if nothing happens."""
        is_suspect = blocked_by == "suspect"  # it gets nothing new, however much there is
        self.shares.waits(request.rollout, 0 if is_suspect else request.room or request.max_groups)
        free_at_s = self.shares.next_change_s(request.rollout, now_s)
        return math.inf if free_at_s is None else free_at_s

    def _dispatch(self, again: list[Row], draft: Draft, request: DrawRequest, version: int) -> list[Assignment]:
        if not (again or draft.rows):
            return []
        partials = {row.group_id: self.payloads.partial(row.group_id) for row in again}
        theirs = {"rollout": request.rollout, "epoch": request.epoch}
        started = [replace(row, **theirs, version=self.admission.version_of(row.group_id)) for row in again]
        number = self.payloads.number_terms(self.settings.terms) if draft.prompts else 0
        given = {"version": version, "terms": number, **theirs}
        drawn = [row if row.reason else replace(row, **given) for row in draft.rows]
        fresh = [row for row in drawn if not row.reason]
        prompts = {row.group_id: self.cursor.prompt_of(row) for row in again} | draft.prompts
        self.ledger.dispatch(drawn, started, draft.stretch)
        terms = {row.group_id: self.payloads.terms_of(row) for row in (*started, *fresh)}
        return [
            Assignment(
                prompt=prompts[row.group_id],
                attempt=self._row(row.group_id).attempt,
                num_samples=row.num_samples,
                sampling=terms[row.group_id].sampling,
                partial=partials.get(row.group_id, ()),
                knobs=terms[row.group_id].knobs,
            )
            for row in (*started, *fresh)
        ]

    def why_no_work(self, request: DrawRequest, version: int, now_s: float) -> DrawBlock:
        return "finished" if self.is_finished else self._queue.why_none(request, version, now_s)

    def put(self, group: Group, attempt: int, rollout: str) -> PutResult:
        """A finished group; only the attempt and actor that have it now are heard."""
        group_id = group.group_id
        row = self.ledger.find(group_id)
        if row is None:
            return PutResult(outcome="stale-attempt", reason=f"group {group_id} was never drawn")
        is_theirs = (row.attempt, row.rollout) == (attempt, rollout)
        if row.state not in (State.DISPATCHED, State.REQUEUED) or not is_theirs:
            return self._answer_again(row, group, is_theirs)
        self.poison.finished((rollout, row.epoch), group_id)
        group_filter = self._filters.by_name[self.settings.values.group_filter]
        reason, detail = refusal(group, self.cursor.prompt_of(row), row.num_samples, group_filter)
        if reason == INVALID:
            self._log.warning("group %d of %s is dropped: %s", group_id, rollout, detail)
        payload, note = b"", ""
        if reason is None:
            group, masked = mask_members(group, self._filters.of_samples)
            reason, note = (ALL_MASKED if masked and is_all_masked(group) else None), masked_text(masked)
        if reason is None:
            try:
                payload = encode(group)
            except ValueError as error:
                reason, detail = INVALID, str(error)
        reward = None if reason == INVALID else mean_reward(group)
        if reason is None:
            result = self._keep(group, payload, row.version, reward, note)
        else:
            result = self._refuse(row, reason, detail or note, num_response_tokens(group), reward)
        if reward is not None:
            self.cursor.finished(row, reward)
            self.finished.add(row.source, group, is_left_out=result.outcome == "filtered")
        return result

    def _refuse(self, row: Row, reason: str, detail: str, num_tokens: int, reward: float | None) -> PutResult:
        group_id = row.group_id
        self.ledger.refuse(group_id, reason, detail=detail, num_tokens=num_tokens, reward=reward)
        self.admission.filtered(group_id)
        self.starvation.left_out(reason, detail)
        return PutResult(outcome="filtered", reason=detail or reason)

    def _keep(self, group: Group, payload: bytes, announced: int, reward: float | None, note: str) -> PutResult:
        group_id, stamp, num_tokens = group.group_id, group.oldest_version(), num_response_tokens(group)
        version = announced if stamp == NO_VERSION else self.admission.counted(group_id, stamp)
        self.ledger.finish(group_id, payload, version=version, num_tokens=num_tokens, reward=reward, note=note)
        self.admission.ready(group_id, version)
        self.starvation.kept()
        self.payloads.keep_meta(group, version)
        return PutResult(outcome="ready")

    def _answer_again(self, row: Row, group: Group, is_theirs: bool) -> PutResult:
        if row.state is State.DROPPED and row.num_tokens < 0:
            self.ledger.note_length(row.group_id, num_response_tokens(group))
            return PutResult(outcome="stale-attempt", reason=f"was dropped meanwhile: {row.reason}")
        if is_theirs:
            return PutResult(outcome="duplicate", reason=f"is {row.state}")
        return PutResult(outcome="stale-attempt", reason=f"is {row.state} in attempt {row.attempt} of {row.rollout!r}")

    def give_up(self, group_id: int, attempt: int, rollout: str, reason: str, detail: str) -> bool:
        """A rollout actor gives a group up; False if it is not (any more) its to give up."""
        if (row := self._held(group_id, attempt, rollout)) is None:
            return False
        self._give_up(row, reason, detail)
        return True

    def _give_up(self, row: Row, reason: str, detail: str) -> None:
        self.ledger.drop([(row.group_id, reason)], detail)
        self.admission.filtered(row.group_id)
        self.poison.forget(row.group_id)
        self.starvation.left_out(reason, detail)
        self.cursor.failed(row, reason, detail)

    def take_back(self, returned: GroupReturned, now_s: float) -> bool:
        """A rollout actor returns a group with its tokens, or reports the tokens and keeps the group; False if the
        group is not assigned to it (any more)."""
        group_id, rollout, partial = returned.group_id, returned.rollout, returned.partial
        row = self._held(group_id, returned.attempt, rollout)
        if row is None:
            return False
        if returned.goes_on:
            if is_saved := self.payloads.save_partial(row, partial):
                self.poison.has_tokens(group_id, num_tokens_of(partial))
            return is_saved
        if (wrong := wrong_in_partial(partial, group_id, row.num_samples)) is not None:
            self._log.warning("group %d of %s starts again from its prompt: %s", group_id, rollout, wrong)
            partial = ()
        self.poison.has_tokens(group_id, num_tokens_of(partial))
        if returned.has_died:
            self.poison.broke((rollout, row.epoch), now_s)
        take = self._died if returned.has_died else self._requeue
        take([row], f"handed back by {rollout}", partial)
        return True

    def gone(self, rollout: str, epoch: int) -> int:
        """An incarnation (and every older one) of a rollout actor ended; returns how many groups it had."""
        self.shares.served(rollout)
        rows = [row for row in self._owned_by(rollout) if row.epoch <= epoch]
        self._died(rows, f"{rollout} (epoch {epoch}) is gone")
        return len(rows)

    def _died(self, rows: list[Row], detail: str, partial: tuple[Sample, ...] = ()) -> None:
        """Their actor or engine ended while it held them. If the buffer restarted meanwhile, that does not count."""
        self._requeue(rows, detail, partial)
        dispatched = {row.group_id: row for row in rows if row.state is State.DISPATCHED}
        actors = {group_id: (row.rollout, row.epoch) for group_id, row in dispatched.items()}
        for group_id in self.poison.died(actors):
            self._give_up(dispatched[group_id], POISON, self.poison.why())

    def _requeue(self, rows: list[Row], detail: str, partial: tuple[Sample, ...] = ()) -> None:
        if not rows:
            return
        data = encode(partial) if partial else None
        held = {row.group_id: partial or self.payloads.partial(row.group_id) for row in rows}
        stamps = {group_id: oldest_version(samples, NO_VERSION) for group_id, samples in held.items()}
        oldest = {group_id: self.admission.counted(group_id, stamp) for group_id, stamp in stamps.items()}
        self.ledger.requeue([(row.group_id, data, oldest[row.group_id]) for row in rows], detail)
        for row in rows:
            self.admission.requeued(row.group_id, oldest[row.group_id])

    def claim(self, step: int) -> tuple[GroupMeta, ...] | None:
        """The batch of `step`, now or again; None while it cannot be formed. Sets `is_finished` when it never will."""
        if held := self.ledger.claim_of(step):
            return tuple(self.payloads.meta_of(row) for row in held)
        if step != self.ledger.next_step:
            raise LedgerError(
                f"step {step} asks for a batch, but the next step is {self.ledger.next_step}",
                remedy="a trainer that starts from a checkpoint first calls rewind with its version",
            )
        if self.is_finished:
            return None
        try:
            selection = self.admission.select(step)
            self._drop_overdue(selection.overdue)
            if selection.claim is not None:
                self.ledger.claim(step, selection.claim)
                return tuple(self.payloads.meta_of(row) for row in self.ledger.claim_of(step))
        except BaseException:
            self._rebuild()
            raise
        if self.admission.num_open < self.admission.batch_size and not self.may_draw:
            leftovers = self.ledger.rows(*OPEN)
            self.ledger.drop([(row.group_id, LEFTOVER) for row in leftovers], "no whole batch can be formed any more")
            for row in leftovers:
                self.admission.filtered(row.group_id)
                self.payloads.forget(row.group_id)
            self.is_finished = True
        return None

    def fetch(self, group_ids: Iterable[int]) -> tuple[Group, ...]:
        """Payloads in the order asked for. Raises LedgerError naming the first group that has none."""
        return tuple(self.payloads.group(group_id) for group_id in group_ids)

    def first_of_batch(self, step: int, num_groups: int) -> tuple[Group, ...]:
        """So many groups of the batch of `step` that was claimed, as far as they can be read: for people."""
        try:
            return self.fetch([row.group_id for row in self.ledger.claim_of(step)[:num_groups]])
        except LedgerError as error:
            self._log.info("step %d: its samples cannot be shown: %s", step, error)
            return ()

    def trained(self, step: int) -> bool:
        """The batch of `step` was trained; False if that was known."""
        held = self.ledger.claim_of(step)
        if not self.ledger.trained(step):
            return False
        self.admission.trained(step)
        for row in held:
            self.payloads.forget(row.group_id)
        return True

    def rewind(self, version: int) -> int:
        """Training continues from `version`; returns how many groups are READY again."""
        num_ready = self.ledger.rewind(version)
        self.is_finished = False
        self.settings.stop(False)
        self.payloads.forget_all()
        self._rebuild()
        return num_ready

    def retune(self, values: Mapping[str, KnobValue], epoch: int) -> tuple[Overdue, ...]:
        """Other values of knobs from now on; returns what had to be dropped for them."""
        overdue = self.settings.change(values, epoch)
        self.cursor.use(self.settings.values.mix, self.settings.values.difficulty)
        self._drop_overdue(overdue)
        return overdue

    def _drop_overdue(self, overdue: tuple[Overdue, ...]) -> None:
        if overdue:
            self.ledger.drop([(item.group_id, item.reason) for item in overdue])
        for item in overdue:
            self.payloads.forget(item.group_id)
            self.poison.forget(item.group_id)

    def stats(self) -> BufferStats:
        tally, states = self.ledger.tally, self.ledger.tally.states
        return BufferStats(
            states=states,
            drawn=self.ledger.next_draw,
            trained=states.get(State.TRAINED, 0) + states.get(State.DURABLE, 0),
            dropped=tally.dropped,
            slots_total=self.admission.slots_total,
            slots_used=self.admission.slots_used,
            max_staleness=self.admission.max_staleness,
            policy=self.admission.policy,
            mean_tokens=tally.mean_tokens,
            complaint=self.starvation.complaint,
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
            "buffer/quarantined": float(len(self.cursor.quarantine or ())),
        }
        if self.cursor.chooses:
            values |= self._gauges_of_sources()
        values |= self.finished.newest()
        values |= {f"buffer/masked/{reason}": float(count) for reason, count in self.ledger.tally.masked.items()}
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
        return f"{self.ledger.next_draw} prompts drawn{left_out}"

    @property
    def may_draw(self) -> bool:
        return self._queue.may_draw

    def _rebuild(self) -> None:
        """Admission from the ledger: at the start, after a rewind, and when the ledger could not be written."""
        places = [
            LinePlace(row.group_id, row.version, _STAGES.get(row.state, LineStage.TAKEN)) for row in self.ledger.line()
        ]
        known = self.ledger
        overdue = self.admission.restore(places, next_step=known.next_step, newest_version=known.newest_version)
        self._drop_overdue(overdue)

    def _row(self, group_id: int) -> Row:
        if (row := self.ledger.find(group_id)) is None:
            raise LedgerError(f"group {group_id} was never drawn")
        return row

    def _owned_by(self, rollout: str) -> list[Row]:
        return [row for row in self.ledger.rows(State.DISPATCHED, State.REQUEUED) if row.rollout == rollout]

    def _held(self, group_id: int, attempt: int, rollout: str) -> Row | None:
        row = self.ledger.find(group_id)
        if row is None or row.state not in (State.DISPATCHED, State.REQUEUED):
            return None
        return row if (row.attempt, row.rollout) == (attempt, rollout) else None


class Payloads:
    """What groups hold, as records, and the short account of each by which the trainer's leader plans. Raises
    LedgerError naming a group whose payload is damaged or missing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._metas: dict[int, GroupMeta] = {}
        self._terms: dict[int, Terms] = {}
        self.newest: Group | None = None
        """The group that was kept last, as it is kept: some of its members may be masked."""

    def partial(self, group_id: int) -> tuple[Sample, ...]:
        data = self._ledger.payload(group_id)
        return () if data is None else decode_partial(group_id, data)

    def save_partial(self, row: Row, partial: tuple[Sample, ...]) -> bool:
        """Keep unfinished samples of a group that is under way; False if something is wrong with them."""
        if not partial or wrong_in_partial(partial, row.group_id, row.num_samples) is not None:
            return False
        self._ledger.save_partial(row.group_id, encode(partial))
        return True

    def group(self, group_id: int) -> Group:
        row = self._ledger.find(group_id)
        if row is None:
            raise LedgerError(f"group {group_id} was never drawn")
        if row.state not in (State.READY, State.CLAIMED, State.TRAINED):
            raise LedgerError(f"group {group_id} is {row.state}: it has no payload to fetch")
        return decode_group(group_id, self._ledger.payload(group_id) or b"")

    def meta_of(self, row: Row) -> GroupMeta:
        meta = self._metas.get(row.group_id)
        return meta or self.keep_meta(self.group(row.group_id), row.version)

    def keep_meta(self, group: Group, version: int) -> GroupMeta:
        """A group that has just arrived; `version`: of its oldest token."""
        meta = self._metas[group.group_id] = _meta(group, version)
        self.newest = group
        return meta

    def forget(self, group_id: int) -> None:
        self._metas.pop(group_id, None)

    def forget_all(self) -> None:
        """After the rows were changed behind these accounts."""
        self._metas.clear()

    def number_terms(self, terms: Terms) -> int:
        number = self._ledger.number_terms(msgspec.json.encode(terms).decode())
        self._terms[number] = terms
        return number

    def terms_of(self, row: Row) -> Terms:
        if row.terms not in self._terms:
            text = self._ledger.terms(row.terms)
            try:
                terms = msgspec.json.decode(text, type=Terms)
            except msgspec.MsgspecError as error:
                raise LedgerError(f"the terms of group {row.group_id} are damaged: {error}") from error
            self._terms[row.terms] = terms
        return self._terms[row.terms]


def oldest_version(partial: tuple[Sample, ...], version: int) -> int:
    """Oldest stamp of unfinished samples, or of what starts now at `version`."""
    stamps = [stamp for stamp in (sample.oldest_version() for sample in partial) if stamp >= 0]
    return min([*stamps, version]) if version >= 0 else min(stamps, default=NO_VERSION)


def _meta(group: Group, version: int) -> GroupMeta:
    return GroupMeta(
        group_id=group.group_id,
        num_tokens=tuple(sample.num_tokens for sample in group.samples),
        loss_tokens=tuple(int(sample.loss_mask.sum()) for sample in group.samples),
        rewards=tuple(float(reward) for reward in group.rewards),
        oldest_version=version,
    )


class StarvationCheck:
    """Counts groups in a row that gave nothing to train on: says when a person must hear of it, and when to give up. A
    run whose groups are all left out would generate for ever and only look slow. It is not stopped: a model may yet
    learn to solve a task. Prompts that cannot be used at all are another matter: training makes them no shorter."""

    def __init__(self, batch_size: int) -> None:
        self._limit = NUM_BATCHES * batch_size
        self._reasons: Counter[str] = Counter()
        self._last_detail = ""
        self._tell_at = self._limit

    def kept(self) -> None:
        self._reasons.clear()
        self._tell_at = self._limit

    def left_out(self, reason: str, detail: str = "") -> None:
        is_known = reason in self._reasons or len(self._reasons) < _MAX_REASONS
        self._reasons[reason if is_known else "other"] += 1
        self._last_detail = detail

    @property
    def complaint(self) -> str:
        """Empty, or what a person should know now."""
        num = self._reasons.total()
        if num < self._limit:
            return ""
        counts = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
        remedy = REMEDIES.get(self._reasons.most_common(1)[0][0], OTHER_REMEDY)
        return f"the last {num} groups in a row were all left out ({counts}) -- {remedy}"

    def news(self) -> str:
        """The complaint when it is due: first at the limit, then whenever the number has doubled; else nothing."""
        if self._reasons.total() < self._tell_at:
            return ""
        self._tell_at = 2 * self._reasons.total()
        return self.complaint

    @property
    def verdict(self) -> DataError | None:
        num = self._reasons.total()
        if num < self._limit or set(self._reasons) != {UNUSABLE}:
            return None
        return DataError(f"none of the last {num} prompts could be used; the last one: {self._last_detail}")
