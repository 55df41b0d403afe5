"""Datasets: files to rows, rows to prompts, prompts in draw order. pyarrow is imported for parquet only."""

from __future__ import annotations

from .layout import RowLayout
from .prompts import MixedDataset, PromptDataset, open_data, open_prompts
from .row_set import RowSet

__all__ = ["RowLayout", "MixedDataset", "PromptDataset", "RowSet", "open_data", "open_prompts"]
