"""How probable a deviation at least this large is by chance. Of scipy's, whose import takes four seconds, the two that
tests need."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[Any]


def kolmogorov_smirnov(law_at_values: Numbers) -> float:
    """Of values, given what the law's distribution function says of each; for many values."""
    found, count = np.sort(law_at_values), law_at_values.size
    steps = np.arange(count + 1) / count
    largest = max((steps[1:] - found).max(), (found - steps[:-1]).max())
    terms = np.arange(1, 101)
    p_value = 2 * ((-1.0) ** (terms - 1) * np.exp(-2 * count * (terms * largest) ** 2)).sum()
    return float(np.clip(p_value, 0, 1))


def chi_square(found: Numbers, wanted: Numbers) -> float:
    """Of counts, given those that are expected."""
    statistic = ((found - wanted) ** 2 / wanted).sum()
    shape = torch.tensor((found.size - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(shape, torch.tensor(statistic / 2, dtype=torch.float64)).item()
