"""Datasets: files to rows, rows to prompts, prompts in draw order. pyarrow is imported for parquet only."""

from __future__ import annotations

from .layout import Layout
from .mixed import MixedDataset, open_data
from .prompts import PromptDataset, open_prompts
from .row_set import RowSet

__all__ = ["Layout", "MixedDataset", "PromptDataset", "RowSet", "open_data", "open_prompts"]
