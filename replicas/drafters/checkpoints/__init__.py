"""Checkpoints of heads: config.json and named tensors, refused by name where they do not fit."""

from replicas.drafters.checkpoints.source import Head, HeadSource
from replicas.drafters.checkpoints.tensors import layer_tensors
