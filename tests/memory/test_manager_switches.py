"""C9: real processes, real memory, real sockets: ten changes of hands, never more than the device has, nothing lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.memory.manager_site import CAPACITY, site_of
from tests.memory.manager_toys import MIB, TRAINER

pytestmark = pytest.mark.timeout(100)

NUM_SWITCHES = 10
MEMBERS = {
    "trainer/0": ("trainer", "host:0"),
    "trainer/1": ("trainer", "host:1"),
    "rollout/0": ("rollout", "host:0,host:1"),
}


def never_switched(num_steps: int) -> list[float]:
    """The same training in one piece."""
    size = TRAINER["params"][0] // 4
    params = np.full(size, 0.5, np.float32)
    master, moment = np.full(size, 0.5, np.float32), np.full(size, 0.5, np.float32)
    losses: list[float] = []
    for step in range(1, num_steps + 1):
        grads = params * np.float32(0.01 * step)
        grads += np.float32(0.001)
        moment *= np.float32(0.9)
        moment += grads
        master -= np.float32(0.05) * moment
        params[:] = master
        losses.append(float(params.astype(np.float64).sum() + moment.astype(np.float64).sum()))
    return losses


async def test_switches_with_real_memory_lose_nothing(tmp_path: Path) -> None:
    async with site_of(tmp_path, MEMBERS) as site:
        site.sample()
        losses: dict[str, list[float]] = {"trainer/0": [], "trainer/1": []}
        copied: list[int] = []
        epochs: list[int] = []
        for number in range(NUM_SWITCHES):
            gang, other = ("trainer", "rollout") if number % 2 == 0 else ("rollout", "trainer")
            reply = await site.lease(gang, other)
            assert reply.granted, reply.reason
            copied.append(reply.copied_bytes)
            epochs.append(reply.epoch)
            for name in (n for n in MEMBERS if n.startswith(gang)):
                done = await site.toy(name).work(2)
                if gang == "trainer":
                    losses[name] += done
                else:
                    assert done == [0.5, 0.5]
        site.stop_sampling()
        assert losses["trainer/0"] == losses["trainer/1"] == never_switched(NUM_SWITCHES)  # bit-equal
        assert site.num_samples > 10
        for device in site.devices:
            assert 32 * MIB <= site.peak[device] <= CAPACITY, f"{device}: {site.peak[device]:,} bytes of the device"
            num_reached = max(len(on.split(",")) for _, on in MEMBERS.values() if device in on)
            limit = num_reached * CAPACITY + MIB
            assert site.peak_rss[device] <= limit, f"{device}: {site.peak_rss[device]:,} bytes resident"
        assert epochs == sorted(set(epochs))
        # Only dirty backups move: an engine's lease copies two ranks' optimizers out and, from its second one on,
        # nothing of its own weights, whose copy stays good; a trainer's copies the optimizers back.
        assert copied[3:] == [copied[3], copied[4]] * ((NUM_SWITCHES - 3) // 2) + [copied[3]] * ((NUM_SWITCHES - 3) % 2)
        view = await site.view()
        assert all(device.unattributed_bytes <= MIB for device in view.devices)
        assert view.switching == ""
        assert view.timeline
