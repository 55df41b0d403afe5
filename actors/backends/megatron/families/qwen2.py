"""Qwen2: queries, keys and values have a bias."""

from __future__ import annotations

from .decoder import ATTENTION, ATTENTION_BIAS, MLP, MODEL, NORMS
from .rule import Family

QWEN2 = Family(model=MODEL, layer=(*NORMS, *ATTENTION, *ATTENTION_BIAS, *MLP))
