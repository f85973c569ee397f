from __future__ import annotations

import pytest

from tests.cluster.kubernetes.helm import documents, render
from tests.cluster.kubernetes.rendered import CASES, Rendered


@pytest.fixture(params=CASES)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """The chart's resources, for each set of values."""
    return documents(render(CASES[request.param]))
