"""Proves: whatever is drawn from the APIs' own schemas gets an answer and never a 5xx, also broken;
what is well-formed is answered; calls whose clients leave leave nothing. `make fuzz` sends more."""

from __future__ import annotations

import pytest

from tests.cluster.frontend.fuzz.http import fuzz


@pytest.mark.long
async def test_drawn_requests_are_answered_or_refused_and_leave_nothing() -> None:
    assert (
        await fuzz(0, broken=120, well_formed=40, odd=80, grpc=60, disconnects=20, structures=40)
        == 0
    )
