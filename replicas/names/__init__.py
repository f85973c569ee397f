"""The names by which models are asked for, read without model code: no torch, no transformers."""

from replicas.names.model_names import (
    DEMO,
    READERS,
    SMOLLM2,
    TINY,
    demo_target,
    gguf_file,
    hub_revision,
    with_revision,
)
from replicas.names.planted_shapes import (
    ACCEPTANCE,
    DRAFTS,
    SHAPES,
    PlantedName,
    is_planted,
    map_shift,
    parse_planted,
)
