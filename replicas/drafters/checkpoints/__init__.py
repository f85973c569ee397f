"""Checkpoints of heads: config.json and named tensors, refused by name where they do not fit."""

from replicas.drafters.checkpoints.named import head_of, refuse_ranks
from replicas.drafters.checkpoints.tensors import (
    layer_tensors,
    load_tensors,
    no_storage,
    read_config,
    tensor_names,
)
