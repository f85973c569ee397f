"""Measures how much memory torch's CPU allocator holds at most while something runs.

What `numpy.empty` makes comes from torch meanwhile, so that it is counted; nothing else of numpy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

_DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float16): torch.float16}


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes allocated at once by `run`, over what was allocated before it.

    Counts every allocation of torch's, those inside of operators included; it does not see that
    what was allocated before is freed.
    """
    empty = np.empty

    def from_torch(shape: Any, dtype: Any = np.float64, **options: Any) -> Any:
        known = _DTYPES.get(np.dtype(dtype))
        if known is None or options:
            return empty(shape, dtype, **options)
        return torch.empty(shape, dtype=known).numpy()

    with (
        patch("numpy.empty", from_torch),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        kept = run()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event for event in events if event.name() == "[memory]"]
    assert changes, "nothing was allocated, or the profiler does not see it"
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    del kept
    return peak
