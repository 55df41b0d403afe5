"""The seed of one turn, where a run is drawn by seeds. Pure."""

from __future__ import annotations

from hashlib import blake2b

SEED_BITS = 63
"""Servers keep seeds as signed 64-bit numbers."""


def turn_seed(seed: int, draw: int, index: int, turn: int) -> int:
    """Of one turn, from 0 up to 2**63: other turns, samples, draws and runs have unrelated ones."""
    digest = blake2b(f"{seed}/{draw}/{index}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
