"""A short run of the fuzzer in the default suite; `make fuzz` is the long one."""

from __future__ import annotations

import logging
import random

import pytest
from tests.fuzz import over_socket


@pytest.mark.timeout(120)
async def test_broken_frames_and_hostile_peers_do_not_disturb_a_good_one():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    logging.disable(logging.WARNING)  # every refusal is logged; thousands are no news here
    try:
        over_socket.check(await over_socket.attack(2_000, 30, seed))
    finally:
        logging.disable(logging.NOTSET)
