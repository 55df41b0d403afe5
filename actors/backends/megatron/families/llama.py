"""Llama: the plain decoder."""

from __future__ import annotations

from .decoder import ATTENTION, MLP, MODEL, NORMS
from .rule import Family

LLAMA = Family(model=MODEL, layer=(*NORMS, *ATTENTION, *MLP))
