"""The oracle where groups are cut wherever lengths differ: in turns, each row reads only as far as
those that are as long, and every request receives what it would alone."""

from __future__ import annotations

import pytest

from cluster.local_engine import LocalEngine
from scheduler.config import SchedulerConfig
from tests.oracle.test_parts import padding
from tests.oracle.worlds import sampled, world
from tests.tiny_pairs import ARCHITECTURES, tiny_replica

SEED = 121


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("draft_len", [0, 4, None])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_is_that_of_plain_decoding(
    architecture: str, draft_len: int | None, graphs: str
) -> None:
    """With and without steps of fixed shapes, on models that read all rows of a group alike."""
    paddings = []
    for apart in (None, 0):
        config = SchedulerConfig(
            rows_max=6, draft_len=draft_len, wait_rounds=4, apart_positions=apart
        )
        replica = tiny_replica(architecture, fuse_layers=False, graphs=graphs)
        assert not replica.spec.reads_apart
        engine = LocalEngine(replica, config, check=True)
        outputs = engine.generate(world(architecture, SEED).requests)
        assert [output.tokens for output in outputs] == world(architecture, SEED).greedy
        paddings.append(padding(engine))
        outputs = engine.generate(sampled(world(architecture, SEED).requests))
        assert [output.tokens for output in outputs] == world(architecture, SEED).sampled
    whole, cut = paddings
    # What pads the bucket of a fixed shape stays where groups are cut.
    assert cut < (0.6 if graphs == "off" else 0.9) * whole
