"""The buffer as an actor on a real node: the life of groups, fences, lies, long polls, the end of the data."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.buffer.conftest import make_group, make_sample
from tests.harness.ledger_audit import audit_ledger
from tests.harness.waiting import until

from myxa.actors.contracts import BufferContract
from myxa.actors.ledger.file import STALE
from myxa.actors.trainer.train_loop import GroupFetcher
from myxa.algos.filters import zero_variance
from myxa.core.errors import BadRequest, DiskRefused, LedgerError, MessageTooLarge, TrainError
from myxa.core.messages import GroupDropped, GroupFinished, GroupReturned
from myxa.core.refs import with_deadline
from myxa.core.samples import Group
from myxa.transport.node import Node
from myxa.transport.session import serving
from myxa.transport.session.frames import LIMITS

WAIT_S = 20.0


def changed(group: Group, **changes: Any) -> Group:
    return msgspec.structs.replace(group, **changes)


def with_sample(group: Group, **changes: Any) -> Group:
    first = group.samples[:-1]
    return changed(group, samples=(*first, msgspec.structs.replace(group.samples[-1], **changes)))


async def test_a_group_from_draw_to_durable(shop: Any) -> None:
    async with shop.open() as desk:
        reply = await desk.draw(max_groups=2)
        assert [a.prompt.group_id for a in reply.assignments] == [0, 1]
        assert {(a.attempt, a.num_samples, a.sampling.max_new_tokens) for a in reply.assignments} == {(1, 2, 4)}
        groups = [make_group(a) for a in reply.assignments]
        for assignment, group in zip(reply.assignments, groups, strict=True):
            assert (await desk.put_group(group, assignment.attempt, "rollout/0")).outcome == "ready"
        claim = await desk.ref.claim(0, 0.0)
        assert list(claim.groups.items()) == [(0, 0), (1, 0)]
        fetched = await desk.ref.fetch((1, 0))
        assert [g.group_id for g in fetched] == [1, 0]
        for name in ("prompt_ids", "response_ids", "logprobs", "loss_mask", "versions"):
            sent, got = getattr(groups[1].samples[0], name), getattr(fetched[0].samples[0], name)
            assert sent.dtype == got.dtype
            assert np.array_equal(sent, got)
        assert fetched[0].reward_parts == groups[1].reward_parts
        assert (await desk.ref.claim(0, 0.0)).groups == claim.groups, "claimed again, the same groups"
        await desk.ref.trained(0)
        await desk.ref.trained(0)
        await desk.ref.durable(1)
        await desk.ref.durable(1)
        stats = await desk.ref.stats()
        assert stats.states == {"DURABLE": 2}
        assert (stats.drawn, stats.trained) == (2, 2)
        assert stats.mean_tokens == {"trained": 4.0}


async def test_a_batch_that_no_message_holds_comes_in_several(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with shop.open(batch_size=4, max_staleness=0) as desk:
        for number, assignment in enumerate((await desk.draw(max_groups=4)).assignments):
            text = "x" * (800_000 if number == 2 else 400_000)
            group = with_sample(make_group(assignment), text=text)
            assert (await desk.put_group(group, assignment.attempt, "rollout/0")).outcome == "ready"
        ids = tuple((await desk.ref.claim(0, 0.0)).groups)
        monkeypatch.setattr(serving, "LIMITS", msgspec.structs.replace(LIMITS, body=1_500_000))
        node = await Node.attach(name="trainer-node", rdzv=desk.node.rendezvous)
        fetching = GroupFetcher(node.ref(BufferContract, "buffer").fetch)
        assert [group.group_id for group in await fetching.groups(ids)] == [0, 1, 2, 3]
        assert fetching.at_once == 2, "2.0 MB of text are too much for one message, and 1.2 are not"
        await node.close(grace_s=0.3)

        async def too_large(group_ids: tuple[int, ...]) -> tuple[Group, ...]:
            raise MessageTooLarge(f"a reply of {len(group_ids)} groups is over the limit")

        fetching = GroupFetcher(too_large)
        with pytest.raises(TrainError, match=r"group 0 cannot be handed to the trainer: a reply of .* -- lower"):
            await fetching.groups(ids)


async def test_admission_holds_draws_back_and_adoption_releases_them(shop: Any) -> None:
    """eta 1, B 2: four groups at version 0; more only for an engine that has adopted version 1."""
    async with shop.open() as desk:
        first = (await desk.draw()).assignments
        assert len(first) == 4
        assert (await desk.draw()).blocked_by == "staleness"
        for assignment in first:
            await desk.put(assignment)
        await desk.train(0)
        assert (await desk.draw(version=0)).blocked_by == "weights", "this engine serves version 0 still"
        waiting = asyncio.ensure_future(desk.draw(version=0, wait_s=WAIT_S))
        other = asyncio.ensure_future(desk.draw(version=0, wait_s=0.2, rollout="rollout/1"))
        await asyncio.sleep(0.05)
        await desk.adopted("rollout/0", 1, 1)
        assert [a.prompt.group_id for a in (await waiting).assignments] == [4], "one of two slots is the other's"
        assert (await other).blocked_by == "weights", "rollout/1 has adopted nothing"
        await desk.adopted("rollout/1", 1, 1)
        assert (await desk.draw(version=0, epoch=2, rollout="rollout/1")).blocked_by == "weights", "another epoch"
        assert [a.prompt.group_id for a in (await desk.draw(version=1)).assignments] == [5], "it does not ask any more"


async def test_a_claim_waits_for_the_last_group_and_a_poll_ends_in_time(shop: Any) -> None:
    async with shop.open() as desk:
        first, second = (await desk.draw(max_groups=2)).assignments
        await desk.put(first)
        waiting = asyncio.ensure_future(desk.ref.claim(0, WAIT_S))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await desk.put(second)
        assert len((await waiting).groups) == 2
        await desk.ref.trained(0)
        assert (await desk.ref.claim(1, 0.05)).blocked_by == "wait-data"
        hurried = await with_deadline(desk.ref, 1.0).claim(1, 500.0)
        assert hurried.blocked_by == "wait-data", "answers before the caller gives up"


async def test_puts_are_fenced_by_group_attempt_and_actor(shop: Any) -> None:
    async with shop.open() as desk:
        first, second, third = (await desk.draw(max_groups=3)).assignments
        group = make_group(first)
        assert (await desk.put_group(group, 7, "rollout/0")).outcome == "stale-attempt"
        assert (await desk.put_group(group, 1, "rollout/9")).outcome == "stale-attempt"
        prompt = msgspec.structs.replace(group.prompt, group_id=55)
        unknown = changed(group, prompt=prompt)
        assert "never drawn" in (await desk.put_group(unknown, 1, "rollout/0")).reason
        assert (await desk.put_group(group, 1, "rollout/0")).outcome == "ready"
        assert (await desk.put_group(group, 1, "rollout/0")).outcome == "duplicate"
        at_once = [GroupFinished(group=one, attempt=1) for one in (group, unknown, make_group(third))]
        found = await desk.ref.put_groups((*at_once, at_once[-1]), "rollout/0")
        assert [one.outcome for one in found] == ["duplicate", "stale-attempt", "ready", "duplicate"]
        assert await desk.ref.rollout_gone("rollout/0", 1) == 1
        assert (await desk.put(second)).outcome == "stale-attempt", "an incarnation that is gone is not heard"
        (again,) = (await desk.draw(max_groups=1, rollout="rollout/1")).assignments
        assert (again.prompt.group_id, again.attempt) == (1, 2)
        assert (await desk.put(second)).outcome == "stale-attempt"
        assert (await desk.put(again, rollout="rollout/1")).outcome == "ready"


LIES: dict[str, tuple[Callable[[Group], Group], str]] = {
    "a member is missing": (lambda g: changed(g, samples=g.samples[:1], rewards=g.rewards[:1]), "has 1 rollouts"),
    "a member is doubled": (lambda g: changed(g, samples=(*g.samples, g.samples[1])), "numbered"),
    "a reward is NaN": (lambda g: changed(g, rewards=np.array([0, np.nan], np.float32)), "reward"),
    "a reward is missing": (lambda g: changed(g, rewards=g.rewards[:1]), "rewards"),
    "parts are missing": (lambda g: changed(g, reward_parts=g.reward_parts[:1]), "reward parts"),
    "a log-prob is above 0": (lambda g: with_sample(g, logprobs=np.array([1, 1], np.float32)), "log-prob"),
    "a log-prob is NaN": (lambda g: with_sample(g, logprobs=np.array([np.nan, 0], np.float32)), "log-prob"),
    "a mask is short": (lambda g: with_sample(g, loss_mask=np.ones(1, np.uint8)), "loss_mask"),
    "a mask holds 7": (lambda g: with_sample(g, loss_mask=np.array([7, 1], np.uint8)), "loss mask"),
    "stamps are missing": (lambda g: with_sample(g, versions=np.zeros(1, np.int32)), "versions"),
    "another group's sample": (lambda g: with_sample(g, group_id=3), "group 3"),
    "another row": (lambda g: changed(g, prompt=msgspec.structs.replace(g.prompt, row=99)), "row 99"),
    "a short reference": (lambda g: with_sample(g, reference_logprobs=np.zeros(1, np.float32)), "reference_logprobs"),
    **{
        f"a reference of {number}": (
            lambda g, number=number: with_sample(g, reference_logprobs=np.array([number, 0], np.float32)),
            "reference log-prob",
        )
        for number in (np.nan, -np.inf, 0.5)
    },
}


async def test_pitfall_15_groups_that_lie_are_dropped_whole(shop: Any) -> None:
    """A group is kept or dropped whole, its slot is free at once, and the buffer goes on."""
    async with shop.open(batch_size=1, max_staleness=0) as desk:
        for name, (lie, said) in LIES.items():
            (assignment,) = (await desk.draw()).assignments
            result = await desk.put_group(lie(make_group(assignment)), 1, "rollout/0")
            assert (result.outcome, said in result.reason) == ("filtered", True), (name, result.reason)
        assert (await desk.ref.stats()).dropped == {"invalid-samples": len(LIES)}
        (honest,) = (await desk.draw()).assignments
        assert honest.prompt.group_id == len(LIES)
        assert (await desk.put(honest)).outcome == "ready"
        assert await desk.train(0) == (len(LIES),)


async def test_filtered_groups_are_replaced_at_once(shop: Any) -> None:
    async with shop.open(group_filter=zero_variance) as desk:
        for _ in range(10):
            for assignment in (await desk.draw()).assignments:
                result = await desk.put_group(make_group(assignment, rewards=[1.0, 1.0]), 1, "rollout/0")
                assert (result.outcome, result.reason) == ("filtered", "zero_variance")
        assert (await desk.ref.stats()).dropped == {"zero_variance": 40}
        await desk.fill()
        assert await desk.train(0) == (40, 41)


async def test_a_group_handed_back_goes_on_with_its_tokens(shop: Any) -> None:
    async with shop.open() as desk:
        await desk.draw(max_groups=2)
        partial = (make_sample(0, 0, [0, 0, 0], "abort"), make_sample(0, 1, [0], "abort"))
        returned = GroupReturned(group_id=0, attempt=1, rollout="rollout/0", partial=partial)
        await desk.ref.return_group(returned)
        await desk.ref.return_group(returned)
        (again,) = (await desk.draw(max_groups=1, rollout="rollout/1", epoch=4)).assignments
        assert (again.prompt.group_id, again.attempt) == (0, 2)
        assert [s.response_ids.size for s in again.partial] == [3, 1]
        await desk.ref.return_group(GroupReturned(group_id=0, attempt=1, rollout="rollout/0"))
        assert (await desk.ref.stats()).states == {"DISPATCHED": 2}, "a late word of attempt 1 has no effect"
        assert await desk.ref.rollout_gone("rollout/1", 4) == 1
        assert desk.buffer._groups.ledger.find(0).version == 0, "the age of the kept tokens"
        (once_more,) = (await desk.draw(max_groups=1)).assignments
        assert once_more.attempt == 3
        assert [s.response_ids.size for s in once_more.partial] == [3, 1], "kept although attempt 2 died with nothing"
        assert (await desk.put(once_more, versions=(0, 0))).outcome == "ready"


async def test_tokens_that_lie_are_not_handed_on(shop: Any) -> None:
    async with shop.open() as desk:
        await desk.draw(max_groups=1)
        bad = msgspec.structs.replace(make_sample(0, 0, [0, 0]), logprobs=np.array([5, 5], np.float32))
        await desk.ref.return_group(GroupReturned(group_id=0, attempt=1, rollout="rollout/0", partial=(bad,)))
        (again,) = (await desk.draw(max_groups=1)).assignments
        assert (again.prompt.group_id, again.attempt, again.partial) == (0, 2, ())


async def test_the_age_of_kept_tokens_counts_at_consumption(shop: Any) -> None:
    """eta 0: a group handed back at step 0 whose tokens are of version 0 cannot be trained at step 1: drawn again."""
    async with shop.open(max_staleness=0, batch_size=1) as desk:
        await desk.draw(max_groups=1)
        partial = (make_sample(0, 0, [0], "abort"),)
        await desk.ref.return_group(GroupReturned(group_id=0, attempt=1, rollout="rollout/0", partial=partial))
        await desk.rewind(1)
        claim = await desk.ref.claim(1, 0.0)
        assert claim.blocked_by == "wait-data"
        stats = await desk.ref.stats()
        assert stats.dropped == {STALE: 1}
        (again,) = (await desk.draw(version=1)).assignments
        assert (again.prompt.group_id, again.prompt.row, again.partial) == (1, 0, ())


async def test_a_reply_that_was_lost_is_noticed_by_what_the_actor_holds(shop: Any) -> None:
    async with shop.open() as desk:
        await desk.draw(max_groups=2)
        reply = await desk.draw(max_groups=2, holding=(1,))
        assert [(a.prompt.group_id, a.attempt) for a in reply.assignments] == [(0, 2), (2, 1)]
        reply = await desk.draw(max_groups=1, epoch=2, holding=())
        assert [(a.prompt.group_id, a.attempt) for a in reply.assignments] == [(0, 3)], "epoch 1 is dead"


async def test_a_group_that_cannot_be_made_is_dropped_and_counted(shop: Any) -> None:
    async with shop.open() as desk:
        await desk.draw(max_groups=1)
        dropped = GroupDropped(group_id=0, attempt=1, rollout="rollout/0", reason="reward-error", detail="it raised")
        await desk.ref.drop_group(dropped)
        await desk.ref.drop_group(dropped)
        stats = await desk.ref.stats()
        assert stats.dropped == {"reward-error": 1}
        assert stats.slots_used == 0


async def test_nothing_is_handed_out_or_claimed_while_paused(shop: Any) -> None:
    async with shop.open() as desk:
        await desk.fill()
        await desk.ref.claim(0, 0.0)
        await desk.pause()
        assert (await desk.draw()).blocked_by == "paused"
        assert len((await desk.ref.claim(0, 0.0)).groups) == 2, "what is claimed stays claimed"
        await desk.ref.trained(0)
        assert (await desk.ref.claim(1, 0.0)).blocked_by == "paused"
        waiting = asyncio.ensure_future(desk.ref.claim(1, WAIT_S))
        await asyncio.sleep(0.02)
        await desk.pause(2)  # one more step
        assert len((await waiting).groups) == 2
        assert (await desk.draw()).blocked_by == "paused", "work for later steps"
        await desk.ref.trained(1)
        assert (await desk.ref.claim(2, 0.0)).blocked_by == "paused"
        await desk.pause(-1)
        assert (await desk.ref.claim(2, 0.0)).blocked_by == "wait-data"


@pytest.mark.parametrize("is_finished", [False, True])
async def test_the_end_of_the_data(shop: Any, rows: Callable[..., Any], is_finished: bool) -> None:
    """Five rows, batches of two: two batches, one group left over, every caller told that it is over."""
    source = rows(5, max_passes=1)
    async with shop.open(rows=source, max_staleness=4) as desk:
        reply = await desk.draw()
        assert len(reply.assignments) == 5
        assert (await desk.draw()).blocked_by == "data-exhausted"
        for assignment in reply.assignments[: 5 if is_finished else 4]:
            await desk.put(assignment)
        assert await desk.train(0) == (0, 1)
        assert await desk.train(1) == (2, 3)
        last = asyncio.ensure_future(desk.ref.claim(2, WAIT_S))
        puller = asyncio.ensure_future(desk.draw(wait_s=WAIT_S))
        assert (await last).finished
        assert (await puller).blocked_by == "finished"
        stats = await desk.ref.stats()
        assert stats.dropped == {"leftover": 1}
        assert stats.trained == 4
        assert await desk.rewind(2) == (1 if is_finished else 0), "a leftover that was finished is ready again"
        source.max_passes = 2
        given = (await desk.draw(max_groups=1 if is_finished else 2, version=2)).assignments
        assert [one.prompt.group_id for one in given] == ([5] if is_finished else [4, 5])
        for assignment in given:
            await desk.put(assignment, versions=(2, 2))
        assert await desk.train(2) == (4, 5)


async def test_lowering_eta_drops_and_redraws_the_same_rows(shop: Any) -> None:
    async with shop.open(max_staleness=2, batch_size=2) as desk:
        first = (await desk.draw()).assignments
        assert len(first) == 6
        for assignment in first[:4]:
            await desk.put(assignment)
        await desk.train(0)
        verdict = await desk.ref.judge_knobs({"max_staleness": 0}, 0)
        assert not verdict.refusal and verdict.remark.startswith("4 groups"), "what it would cost"
        stats = await desk.ref.stats()
        assert (stats.max_staleness, stats.dropped) == (2, {}), "judged only"
        await desk.change(1, max_staleness=0)
        stats = await desk.ref.stats()
        assert (stats.max_staleness, stats.dropped) == (0, {STALE: 4})
        again = (await desk.draw(version=1)).assignments
        assert [(a.prompt.group_id, a.prompt.row) for a in again] == [(6, 2), (7, 3)]
        late = await desk.put(first[5])
        assert late.outcome == "stale-attempt"
        assert (await desk.ref.stats()).mean_tokens == {"trained": 4.0, STALE: 4.0}
        for assignment in again:
            await desk.put(assignment, versions=(1, 1))
        assert await desk.train(1) == (6, 7)
        await desk.change(2, max_staleness=1, on_stale="wait")
        stats = await desk.ref.stats()
        assert stats.policy == "wait"
        assert stats.slots_total == 4
        rows = [a.prompt.row for a in (await desk.draw(version=2)).assignments]
        assert rows == [4, 5, 6, 7], "first what is owed, then new rows"
        assert not (await desk.change(3, on_stale="hope")).accepted


async def test_claims_out_of_order_are_refused_by_name(shop: Any) -> None:
    async with shop.open() as desk:
        with pytest.raises(LedgerError, match="step 3"):
            await desk.ref.claim(3, 0.0)
        with pytest.raises(LedgerError, match="step 0"):
            await desk.ref.trained(0)
        with pytest.raises(LedgerError, match="group 0"):
            await desk.ref.fetch((0,))
        with pytest.raises(LedgerError, match="newest is 0"):
            await desk.ref.durable(5)
        with pytest.raises(BadRequest, match="version -1"):
            await desk.draw(version=-1)
        assert (await desk.draw(max_groups=0)).assignments == ()
        assert (await desk.draw(max_groups=-5)).assignments == ()
        assert (await desk.draw(max_groups=1, wait_s=-1.0)).assignments
        assert len(await desk.data.eval_prompts(2)) == 2
        assert await desk.data.eval_prompts(-2) == ()


@contextmanager
def refusing_disk() -> Iterator[None]:
    """No file of this process may grow meanwhile (RLIMIT_FSIZE), so the ledger cannot be written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_a_program_that_locks_the_ledger_is_a_pause(shop: Any) -> None:
    async with shop.open() as desk:
        (work,) = (await desk.draw(max_groups=1)).assignments
        with closing(sqlite3.connect(desk.buffer.ledger_path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(DiskRefused, match=r"is locked .* locked by another program \(`fuser` names it\)"):
                await desk.put(work)
        await until(lambda: desk.buffer._opened is not None)
        await desk.draw(max_groups=0, holding=(work.prompt.group_id,))
        assert (await desk.put(work)).outcome == "ready"


async def test_e08_a_disk_that_refuses_is_a_pause(shop: Any) -> None:
    async with shop.open() as desk:
        path = str(desk.buffer.ledger_path)
        first, second = (await desk.draw(max_groups=2)).assignments
        assert (await desk.put(first)).outcome == "ready"
        with refusing_disk():
            with pytest.raises(DiskRefused, match="cannot be written") as refused:
                await desk.put(second)
            assert path in str(refused.value)
            assert " free)" in str(refused.value), "of its file system"
            assert (await desk.draw()).blocked_by == "disk"
            assert (await desk.ref.claim(0, 0.0)).blocked_by == "disk"
            with pytest.raises(DiskRefused):
                await desk.ref.knobs()
            stats = await desk.ref.stats()
            assert path in stats.disk
            assert stats.complaint == stats.disk
            assert stats.states == {"READY": 1, "DISPATCHED": 1}, "as before"
            draw = asyncio.create_task(desk.draw(wait_s=20.0, blocked_by="disk", holding=(second.prompt.group_id,)))
            await asyncio.sleep(0.3)
            assert not draw.done(), "held until it can be written"
            assert not desk.node.failed.done()
        assert (await draw).blocked_by == "disk", "it asks once more, and tells what it has in hand"
        await until(lambda: desk.buffer._opened is not None)
        assert (await desk.put(second)).outcome == "ready"
        assert await desk.train(0) == (0, 1)
        assert (await desk.ref.stats()).disk == ""
    audit = audit_ledger(shop.path)
    assert (audit.problems, audit.trained) == ((), {0: 1, 1: 1})
