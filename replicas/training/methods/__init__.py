"""Kinds of heads that can be trained: of each the new head, its pass over a batch, its
checkpoint."""

from replicas.training.methods.head import Batch, TrainableHead, Unrolled
from replicas.training.methods.method import Method, Weights
from replicas.training.methods.new_clover import CloverMethod
from replicas.training.methods.new_dspark import DSparkMethod
from replicas.training.methods.new_eagle3 import Eagle3Method
from replicas.training.methods.target import frequent_tokens

METHODS: dict[str, Method] = {
    method.name: method for method in (Eagle3Method(), DSparkMethod(), CloverMethod())
}
