"""Target and draft models: loading, the paged forward pass, joined layers, attention."""

from replicas.models.build import (
    attention_over,
    build_model,
    cache_of,
    computes_on_host,
    trial_logits,
)
from replicas.models.device_attention import paged_backend, summed_in_pieces
from replicas.models.load_check import remember_whole
from replicas.models.loader import (
    dtype_name,
    dtype_of,
    load_config,
    load_model,
    may_be_gpu,
    read_model,
    resolve,
    resolve_device,
)
from replicas.models.model_shape import ModelShape, weight_bytes, without_storage
from replicas.models.own_code.layer_reading import computing_by, layers_of
from replicas.models.paged_model import (
    ALL,
    NONE,
    AttentionBackend,
    BatchLayout,
    ForwardOptions,
    Model,
    Output,
    PagedModel,
    fill,
    prefill,
)
from replicas.models.reference import Judgement, judge
from replicas.models.weights.gguf import cache_directory
from replicas.models.weights.rank_weights import keep_own_part
