"""Settings that every test needs: few threads, no downloads, reproducible hypothesis."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

# Before torch or transformers are imported by any test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if os.environ.get("LOCKSTEP_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # a GPU's kernels, on a CPU

import pytest
from hypothesis import HealthCheck, Phase, settings

import replicas.config

# The default model depends on what is installed; in tests it is always the tiny pair.
replicas.config.demo_target = lambda: replicas.config.TINY

# With `--hypothesis-profile explore` each run tries other examples (`make explore`).
settings.register_profile(
    "explore",
    deadline=None,  # machines are shared: time is no property of the code
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# `make worlds`: so many random worlds. One of a smaller number is no simpler: none is shrunk.
settings.register_profile(
    "worlds",
    settings.get_profile("explore"),
    max_examples=int(os.environ.get("WORLDS", 100)),
    phases=[Phase.generate],
    database=None,
)
# What a change is judged by is the change, not the luck of the draw.
settings.register_profile("lockstep", settings.get_profile("explore"), derandomize=True)
settings.load_profile("lockstep")
# `make mutate` asks whether a test fails, not by which example.
settings.register_profile("mutate", phases=[Phase.explicit, Phase.generate])


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:  # the pure core is tested without torch, too
        torch.set_num_threads(1)
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _no_old_models() -> Iterator[None]:
    """Replicas of a module's tests go with it: Python itself looks for cycles of many objects only,
    and a few that hold a model and its cache are gigabytes after a while."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _the_same_random_tensors_each_time() -> None:
    """Torch's own seed is another one in each process."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
