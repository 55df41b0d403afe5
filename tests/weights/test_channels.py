"""The sender's channels against members that join as SGLang does: right bytes; absent, dead and standing members."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.harness.commands import Command

from myxa.actors.torch_store import find_store
from myxa.actors.weights.channels.sender import DeviceWeightSender
from myxa.core.errors import TrainError
from myxa.core.process import boot_id
from myxa.core.weight_channel import JoinRequest, LeaveOrder, PlanRequest, SendOrder, ShareRequest
from myxa.transport.address import in_url, own_address_towards

MEMBER = Path(__file__).with_name("sglang_member.py")
TENSORS = [(f"model.layers.{n}.mlp.up_proj.weight", torch.full((300, 100), n, dtype=torch.bfloat16)) for n in range(5)]
pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def sender() -> Iterator[DeviceWeightSender]:
    made = DeviceWeightSender("trainer/7", channel="nccl", bucket_bytes=130_000, host=boot_id())
    assert made.publish(1, lambda: iter(TENSORS)) is not None
    yield made
    made.close()


def join(
    sender: DeviceWeightSender, name: str, num_ranks: int = 1, timeout_s: float = 30, *, engine_host: str = "127.0.0.1",
    asker_host: str = boot_id(),
):  # fmt: skip
    request = JoinRequest(
        channel=name, engine="the engine", num_ranks=num_ranks, engine_host=engine_host, asker_host=asker_host,
        timeout_s=timeout_s,
    )  # fmt: skip
    return sender.answer(request)


@contextmanager
def start(offer, name: str, rank: int, world_size: int, sizes: list[int]) -> Iterator[subprocess.Popen[str]]:
    words = [in_url(offer.address), str(offer.port), str(rank), str(world_size), name, *map(str, sizes)]
    with Command(words, MEMBER.parent, program=MEMBER, is_merged=False) as member:
        try:
            yield member
        finally:
            member.kill()


def sizes_of(sender: DeviceWeightSender) -> list[int]:
    return [bucket.num_bytes for bucket in sender.answer(PlanRequest(version=1)).buckets]


def hashes(sender: DeviceWeightSender) -> list[str]:
    staged = sender._staging.read(1)
    sender._staging.done(staged)
    buckets = range(len(staged.buffers.plan.buckets))
    return [hashlib.sha256(bytes(staged.buffers.bucket(n).numpy())).hexdigest() for n in buckets]


def test_members_that_join_as_sglang_does_get_every_byte(sender: DeviceWeightSender):
    sizes = sizes_of(sender)
    assert len(sizes) == 3
    offer = join(sender, "pair", num_ranks=2)
    assert offer.backend == "gloo" and offer.address == "127.0.0.1"
    with start(offer, "pair", 1, 3, sizes * 2) as one, start(offer, "pair", 2, 3, sizes * 2) as two:
        for _ in range(2):
            sender.answer(SendOrder(channel="pair", version=1, timeout_s=60))
        said = [member.communicate(timeout=60)[0].split() for member in (one, two)]
    assert said == [["joined", *hashes(sender), *hashes(sender)]] * 2
    assert sum(sizes) == 300 * 100 * 2 * 5


@pytest.mark.parametrize("engine_host", ["::1", "127.0.0.1"])
def test_an_engine_of_another_host_is_offered_an_address_that_it_reaches(sender: DeviceWeightSender, engine_host: str):
    """Also where this host's own name means loopback, as on Debian: the engine would call itself."""
    offer = join(sender, "far", engine_host=engine_host, asker_host="another host")
    assert not ipaddress.ip_address(offer.address).is_loopback


def test_an_engine_with_an_ipv6_address_meets_its_sender(sender: DeviceWeightSender):
    if ":" not in (own := own_address_towards("2001:db8::1")):
        pytest.skip("this host has no IPv6 address")
    offer = join(sender, "six", engine_host=own, asker_host="another host")
    assert offer.address == own
    assert find_store(own, offer.port, 2, 5.0).num_keys() >= 0


def test_two_channels_do_not_wait_for_each_other(sender: DeviceWeightSender):
    """One engine never comes; the other is served meanwhile, and the one that waits is named."""
    join(sender, "nobody", timeout_s=2)
    failure: list[TrainError] = []

    def wait_for_nobody() -> None:
        with pytest.raises(TrainError) as caught:
            sender.answer(SendOrder(channel="nobody", version=1, timeout_s=20))
        failure.append(caught.value)

    waiting = threading.Thread(target=wait_for_nobody)
    waiting.start()
    offer = join(sender, "somebody")
    with start(offer, "somebody", 1, 2, sizes_of(sender)) as member:
        sender.answer(SendOrder(channel="somebody", version=1, timeout_s=60))
        assert member.communicate(timeout=60)[0].split()[1:] == hashes(sender)
        waiting.join(timeout=30)
    (error,) = failure
    assert "trainer/7 could not send weight version 1 to the engine" in error.message
    assert "waiting for the engine's ranks" in error.message and "did not join within 2 s" in error.message
    assert set(sender._channels) == {"somebody"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_member_that_dies_or_stands_still_costs_one_send(sender: DeviceWeightSender, how: signal.Signals):
    sizes = sizes_of(sender)
    offer = join(sender, "doomed")
    with start(offer, "doomed", 1, 2, sizes * 2) as member:
        sender.answer(SendOrder(channel="doomed", version=1, timeout_s=60))
        for _ in (1, *sizes):
            assert member.stdout is not None and member.stdout.readline()
        os.kill(member.pid, how)
        started = time.monotonic()
        with pytest.raises(TrainError, match=r"to the engine: bucket \d of 3: "):
            sender.answer(SendOrder(channel="doomed", version=1, timeout_s=1))
        assert time.monotonic() - started < 30
    assert "doomed" not in sender._channels, "it is never used again"
    with pytest.raises(TrainError, match="has no channel doomed"):
        sender.answer(SendOrder(channel="doomed", version=1, timeout_s=3))
    assert sender.publish(2, lambda: iter(TENSORS)) is not None, "and the sender goes on"


def test_a_send_ends_when_the_channel_is_left(sender: DeviceWeightSender):
    join(sender, "late", timeout_s=20)
    leaves = LeaveOrder(channel="late", reason="the engine was fenced")
    threading.Timer(0.3, sender.answer, (leaves,)).start()
    started = time.monotonic()
    with pytest.raises(TrainError, match="the engine was fenced"):
        sender.answer(SendOrder(channel="late", version=1, timeout_s=60))
    assert time.monotonic() - started < 15


def test_versions_and_channels_that_are_not_there(sender: DeviceWeightSender):
    with pytest.raises(TrainError, match="version 9 is not staged"):
        sender.answer(PlanRequest(version=9))
    with pytest.raises(TrainError, match="version 9 is not staged"):
        sender.answer(SendOrder(channel="x", version=9, timeout_s=1))
    with pytest.raises(TrainError, match="has no channel x"):
        sender.answer(SendOrder(channel="x", version=1, timeout_s=1))
    with pytest.raises(TrainError, match="published nothing yet"):
        join(DeviceWeightSender("t", channel="nccl", bucket_bytes=1, host=""), "x")
    with pytest.raises(TrainError, match="shares GPU memory"):
        sender.answer(ShareRequest(version=1, num_ranks=1))
    join(sender, "once", timeout_s=5)
    with pytest.raises(TrainError, match="a channel of that name"):
        join(sender, "once")
    sender.answer(LeaveOrder(channel="never heard of", reason=""))


def test_a_plan_has_a_digest_for_each_bucket(sender: DeviceWeightSender):
    plan = sender.answer(PlanRequest(version=1))
    assert plan.buckets and not plan.has_channel
    assert len(plan.digest.split(".")) == len(plan.buckets)


def test_a_channel_that_nobody_uses_any_more_is_given_up(sender: DeviceWeightSender):
    """Its engine was killed together with its actor: nobody says a word."""
    sizes = sizes_of(sender)
    used, idle = join(sender, "used"), join(sender, "idle")
    with start(used, "used", 1, 2, sizes * 12) as member, start(idle, "idle", 1, 2, sizes) as dead:
        sender.answer(SendOrder(channel="idle", version=1, timeout_s=60))
        dead.kill()
        for version in range(2, 12):
            sender.publish(version, lambda: iter(TENSORS))
            sender.answer(SendOrder(channel="used", version=version, timeout_s=60))
        assert set(sender._channels) == {"used"}
        assert member.poll() is None
    assert not sender.answer(PlanRequest(version=11, channel="idle")).has_channel, "it would join anew"
