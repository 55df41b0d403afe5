"""A short run of the fuzzer in the default suite; `make fuzz` is the long one."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from tests.fuzz import in_process, over_socket

pytestmark = [pytest.mark.timeout(120)]


@pytest.fixture
def seed() -> int:
    chosen = random.randrange(1 << 32)
    print(f"seed {chosen}")
    return chosen


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Every refusal is logged; thousands are no news here."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


async def test_ten_thousand_frames_change_nothing(seed):
    in_process.check(await in_process.fuzz(10_000, seed, corpus_size=800))


async def test_hostile_peers_over_sockets_do_not_disturb_a_good_one(seed):
    over_socket.check(await over_socket.attack(1_000, 30, seed))
