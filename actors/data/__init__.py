"""Datasets: files to rows, rows to prompts, prompts in draw order. pyarrow is imported for parquet only."""

from __future__ import annotations

from .layout import RowLayout
from .prompts import Dataset, PromptDataset, RowSet, open_data

__all__ = ["RowLayout", "Dataset", "PromptDataset", "RowSet", "open_data"]
