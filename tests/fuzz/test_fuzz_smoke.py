"""Broken frames into a living node over real sockets, and hostile peers beside: nothing crashes, grows or is executed,
refusals are counted, and the good peer is served. `make fuzz` is the long one. A failing run is repeated with the seed
that is printed first."""

from __future__ import annotations

import logging
import random

import pytest
from tests.fuzz import over_socket


@pytest.mark.parametrize(
    ("num_frames", "num_raw"),
    [
        pytest.param(1_000, 16, marks=pytest.mark.timeout(120)),
        pytest.param(200_000, 1_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
async def test_broken_frames_and_hostile_peers_do_not_disturb_a_good_one(num_frames: int, num_raw: int):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    logging.disable(logging.WARNING)  # every refusal is logged; thousands are no news here
    try:
        over_socket.check(await over_socket.attack(num_frames, num_raw, seed))
    finally:
        logging.disable(logging.NOTSET)
