"""Datasets: files to rows, rows to prompts, prompts in draw order. pyarrow is imported for parquet only."""

from __future__ import annotations

from .layout import Layout
from .prompts import PromptDataset, open_prompts
from .row_set import RowSet

__all__ = ["Layout", "PromptDataset", "RowSet", "open_prompts"]
