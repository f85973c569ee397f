"""Measures how much memory torch's CPU allocator holds at most while something runs."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes allocated at once by `run`, over what was allocated before it.

    Counts every allocation of torch's, those inside of operators included; it does not see that
    what was allocated before is freed.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
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
