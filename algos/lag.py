"""How old the tokens of a batch are: statistics of (version trained from - version that generated). numpy only.

Knows versions stamped by engines. Must not know policies (`staleness.py` bounds the lag, this only measures it).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.errors import StalenessError
from ..core.samples import I32


def lag_statistics(step: int, versions: Sequence[I32]) -> dict[str, float]:
    """Lag figures of a batch trained from version `step`; `versions[i]` is int32 [R_i], NO_VERSION where unstamped.

    lag_token_mean / lag_token_max   over stamped tokens
    lag_sample_mean                  over samples, by their oldest token: the age that the bound is about
    lag_mixed_fraction               share of stamped samples whose tokens come from several versions
    lag_span_mean                    newest minus oldest version inside a sample
    Zeros when no engine took part. Raises StalenessError for a token from the future.
    """
    stamped = [v[v >= 0].astype(np.int64) for v in versions]
    stamped = [v for v in stamped if v.size]
    if not stamped:
        names = ("token_mean", "token_max", "sample_mean", "mixed_fraction", "span_mean")
        return {f"lag_{name}": 0.0 for name in names}
    lags = step - np.concatenate(stamped)
    if int(lags.min()) < 0:
        raise StalenessError(
            f"a token of version {step - int(lags.min())} is in a batch that is trained from version {step}",
            remedy="an engine stamped a version before the trainer published it",
        )
    oldest = np.asarray([int(v.min()) for v in stamped])
    span = np.asarray([int(v.max()) for v in stamped]) - oldest
    return {
        "lag_token_mean": float(lags.mean()),
        "lag_token_max": float(lags.max()),
        "lag_sample_mean": float((step - oldest).mean()),
        "lag_mixed_fraction": float((span > 0).mean()),
        "lag_span_mean": float(span.mean()),
    }
