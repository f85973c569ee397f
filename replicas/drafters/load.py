"""Makes the drafter that the settings ask for."""

from __future__ import annotations

from replicas.config import ReplicaConfig
from replicas.cuda.graphs import GraphedModel
from replicas.drafters.eagle3 import Eagle3Drafter, Head
from replicas.drafters.eagle3.layer import HeadLayer
from replicas.drafters.model import ModelDrafter
from replicas.drafters.protocol import Drafter
from replicas.drafters.suffix import SuffixDrafter
from replicas.invariant.backend import HostBackend
from replicas.invariant.ops import Arithmetic
from replicas.kv_cache import CacheShape, PagedCache
from replicas.memory import MemoryPlan, ModelShape
from replicas.models.attention import GatherBackend
from replicas.models.build import build, computes_on_host
from replicas.models.paged_model import AttentionBackend
from replicas.models.pair import Pair, PairRefused


def load_drafter(pair: Pair, config: ReplicaConfig, plan: MemoryPlan) -> Drafter | None:
    """None where nothing drafts; raises PairRefused for what cannot run on the paged cache."""
    if config.drafting.method == "suffix":
        return SuffixDrafter()
    if isinstance(pair.draft, Head):
        return _eagle3(pair, pair.draft, config, plan)
    return None if pair.draft is None else _model_drafter(pair, config, plan)


def _eagle3(pair: Pair, head: Head, config: ReplicaConfig, plan: MemoryPlan) -> Eagle3Drafter:
    sizes = ModelShape.of(head.config)
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    shape = CacheShape(config.block_size, pair.context_len, heads, kv_heads, dim)
    on_host = computes_on_host(config, pair.device)
    cache = PagedCache(
        1, kv_heads, dim, plan.kv_blocks, config.block_size, pair.dtype, pair.device, on_host
    )
    backend: AttentionBackend = GatherBackend(cache, shape)
    if on_host:
        backend = HostBackend(cache, shape, Arithmetic())
    embeddings = pair.target.get_input_embeddings().weight.detach()
    layer = HeadLayer(head, embeddings, cache, shape, backend, plan.prepack)
    return Eagle3Drafter(layer, pair.draft_name)


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
