"""Makes the drafter that the settings ask for."""

from __future__ import annotations

from replicas.config import ReplicaConfig
from replicas.cuda.graphs import GraphedModel
from replicas.drafters.model import ModelDrafter
from replicas.drafters.protocol import Drafter
from replicas.drafters.suffix import SuffixDrafter
from replicas.memory import MemoryPlan
from replicas.models.build import build
from replicas.models.pair import Pair, PairRefused


def load_drafter(pair: Pair, config: ReplicaConfig, plan: MemoryPlan) -> Drafter | None:
    """None where nothing drafts; raises PairRefused for what cannot run on the paged cache."""
    if config.drafting.method == "suffix":
        return SuffixDrafter()
    if pair.draft is None:
        return None
    return _model_drafter(pair, config, plan)


def _model_drafter(pair: Pair, config: ReplicaConfig, plan: MemoryPlan) -> ModelDrafter:
    assert pair.draft is not None
    name = pair.draft_name
    blocks, context_len = plan.kv_blocks, pair.context_len
    try:
        model, _ = build(pair.draft, name, config, blocks, context_len, plan.prepack, exact=False)
    except Exception as error:  # of a model's own code
        raise PairRefused(f"{name}: a trial forward pass failed: {error}") from error
    if config.fixed_shapes(pair.device):
        graphed = GraphedModel(model, plan.work.rows, [1, 2])
        return ModelDrafter(graphed, name, plan.work.pass_tokens)
    return ModelDrafter(model, name, plan.work.pass_tokens)
