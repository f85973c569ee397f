"""Every drafter by a name, on replicas of the tiny pairs: for the tables of identity."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.shared.oracle import OracleDrafter
from replicas.config import ReplicaConfig
from replicas.drafters import DraftSource
from replicas.drafters.overlapped import OverlappedSource
from replicas.drafters.suffix import SuffixSource
from replicas.drafters.suffix_first import SuffixFirstSource
from replicas.pair import Pair
from replicas.replica import Replica
from scheduler.messages import Request
from tests.replicas import clover_heads, one_pass_heads
from tests.replicas.heads import headed_replica, said, save_head
from tests.replicas.one_pass_heads import SLIDING, one_pass_replica, save_one_pass
from tests.tiny_pairs import DEVICE, VOCAB, target_model, tiny_pair

ORACLES = {"never": 0.0, "half": 0.5, "always": 1.0}


def oracle(name: str, answered: Iterable[tuple[Request, Sequence[int]]]) -> OracleDrafter | None:
    """It knows these requests' outputs. None, which leaves the draft to the pair, for a name that
    is no oracle's."""
    if name not in ORACLES:
        return None
    whole = [[*request.prompt, *tokens] for request, tokens in answered]
    return OracleDrafter(whole, ORACLES[name], VOCAB)


def toy_source() -> DraftSource:
    """That of the documentation."""
    page = Path(__file__).parents[2] / "docs" / "add-a-drafter.md"
    match = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert match is not None
    assert match[1].count("\n") < 40
    names: dict[str, type] = {}
    exec(match[1], names)
    made: DraftSource = names["RepeatSource"]()
    return made


@cache
def head(architecture: str) -> str:
    """For this target; in the original format but for Llama."""
    whole = said(speculators=architecture == "llama")
    return save_head(Path(mkdtemp()), target_model(architecture).config, whole)


ONE_PASS = {
    "dflash": {"maker": "z_lab", "block_size": 7, **SLIDING},
    "dspark": {"maker": "dspark", "markov_rank": 5, "markov_head_type": "rnn"},
}
"""What their config.json says."""


@cache
def one_pass_head(architecture: str, drafter: str) -> str:
    """For this target."""
    whole = one_pass_heads.said(**ONE_PASS[drafter])
    return save_one_pass(Path(mkdtemp()), target_model(architecture).config, whole)


@cache
def clover_head(architecture: str) -> str:
    """For this target."""
    target = target_model(architecture).config
    return clover_heads.save_clover(Path(mkdtemp()), target, clover_heads.said())


def replica_of(
    drafter: str,
    answered: Iterable[tuple[Request, Sequence[int]]],
    pair: Pair | None = None,
    **settings: object,
) -> Replica:
    """`answered`: what an oracle knows."""
    pair = pair or tiny_pair("llama")
    if drafter in ("eagle3", "suffix+eagle3"):
        suffix = drafter != "eagle3"
        return headed_replica(head(pair.target_name), pair, suffix, **settings)
    if drafter == "clover":
        return clover_heads.clover_replica(clover_head(pair.target_name), pair, **settings)
    if drafter in ONE_PASS:
        return one_pass_replica(one_pass_head(pair.target_name, drafter), pair, **settings)
    if drafter == "none":
        pair = replace(pair, draft=None)
    elif drafter == "suffix":
        pair = replace(pair, draft=SuffixSource())
    elif drafter == "suffix+model":
        assert pair.draft is not None
        pair = replace(pair, draft=SuffixFirstSource(pair.draft))
    elif drafter == "model+apart":
        assert pair.draft is not None
        pair = replace(pair, draft=OverlappedSource(pair.draft, apart=False, device=pair.device))
    elif drafter == "toy":
        pair = replace(pair, draft=toy_source())
    config = ReplicaConfig(device=DEVICE, block_size=4, **settings)
    return Replica(pair, config, drafter=oracle(drafter, answered))
