"""Versions of other people's packages that myxa was tried with: by its tests, by `make sglang-cpu`, and on GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRIED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.11", "2.13"),
    "transformers": ("5.12", "5.23"),
    "megatron-core": ("0.16", "0.19"),
    "sglang": ("0.5.17", "0.5.23"),
}
"""Distribution -> versions, oldest first; of a version the numbers that are there count."""
UNTRIED_REMEDY = "make a short run first; if it fails, install one of those"
MAX_QUOTED = 40


def untried(package: str, version: str) -> str:
    """That a version is older or newer than all that were tried, in words; empty: it is not, or there is none."""
    tried = [_numbers(tried_version) for tried_version in TRIED[package]]
    numbers = _numbers(version[:MAX_QUOTED])[: len(tried[0])]
    if not version or tried[0] <= numbers <= tried[-1]:
        return ""
    age = "newer" if numbers > tried[-1] else "older" if numbers else "another one"
    shown = "".join(c if c.isprintable() else " " for c in version[:MAX_QUOTED])
    return f"{package} {shown} is {age} than what myxa was tried with ({', '.join(TRIED[package])})"


def _numbers(version: str) -> list[int]:
    """Of "2.13.0+cpu" [2, 13, 0], of what is no version []."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return [int(number) for number in match[0].split(".")] if match else []
