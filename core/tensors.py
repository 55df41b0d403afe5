"""What actors see of large arrays on one host. Values and contracts only; `transport/tensors/` does the work."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt


class LeasedView(np.ndarray[Any, np.dtype[Any]]):
    """What a parameter or reply that is annotated `LeasedArray` holds."""


if TYPE_CHECKING:
    LeasedArray = npt.NDArray[Any]
else:
    LeasedArray = LeasedView
"""A parameter's or reply's type: an array that may be read where its sender wrote it, without a copy.

Read-only. The sender's memory is kept for us until the last array over it is gone, so do not keep it for long; copy
what should stay. What came another way than by shared memory is read-only too, but ours. Any array may be sent as one.
"""


class SharedTensor(Protocol):
    """An array in shared memory, to be filled and sent."""

    @property
    def array(self) -> npt.NDArray[Any]:
        """Writable; leave it alone while it is lent."""
        ...

    @property
    def is_lent(self) -> bool: ...

    async def reclaim(self, timeout_s: float) -> None:
        """Wait until it has no reader; then it may be written again. Raises SlabError after `timeout_s`."""
        ...


class TensorStore(Protocol):
    """Where arrays can be produced in place."""

    def allocate(
        self, shape: tuple[int, ...] | int, dtype: npt.DTypeLike, *, timeout_s: float = 5.0
    ) -> AbstractAsyncContextManager[SharedTensor]:
        """Memory that is given back when the context is left and all readers are done. Raises SlabError: no room."""
        ...
