"""A head as it is read and loaded, for drafters of any form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters.checkpoints.named import head_of, refuse_ranks
from replicas.drafters.checkpoints.tensors import (
    load_tensors,
    no_storage,
    read_config,
    tensor_names,
)
from replicas.drafters.protocol import DraftSource
from replicas.invariant import Arithmetic
from replicas.kv_cache import PagedCache
from replicas.memory import DraftMemory, MemoryPlan
from replicas.models import (
    AttentionBackend,
    ModelShape,
    attention_over,
    cache_of,
    computes_on_host,
    dtype_of,
)


class OfHead(Protocol):
    """What a checkpoint says of a head, beside what `ModelShape.of` reads."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it can draft."""

    @property
    def target_vocab(self) -> int: ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's hidden states that it sees, as transformers numbers them, in its order."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The floating-point tensors that the checkpoint must hold, with their shapes."""

    @property
    def most(self) -> int | None:
        """Draft tokens that it can propose at once; None: any number."""

    @property
    def drafts_by_target(self) -> bool:
        """Whether it drafts with the target's output matrix."""


C = TypeVar("C", bound=OfHead)


@dataclass(frozen=True)
class Head(Generic[C]):
    """A head as loaded."""

    config: C
    tensors: dict[str, torch.Tensor]
    """As `config.tensors` names them."""
    ids: torch.Tensor | None = None  # [vocab of the head], int64: the target's; None: the same
    shift: int | None = None
    """Of a planted head: it proposes the token before plus so many ids."""


@dataclass(frozen=True)
class HeadSource(DraftSource, Generic[C]):
    """A head for the target."""

    name: str
    head: Head[C]

    copies_context = False
    """See `DraftMemory`."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Parts of tensors' names in a checkpoint, and what `OfHead.tensors` has in their place."""

    @staticmethod
    @abstractmethod
    def config_of(said: Mapping[str, Any], names: Collection[str], target: Any) -> C:
        """What `config.json` and the tensors' names say, for a target of this config. Raises
        PairRefused."""

    @classmethod
    def read_head(cls, path: str, target: Any) -> C:
        """Of a directory or a name on the hub. Raises PairRefused, or OSError for a name not
        found."""
        return cls.config_of(read_config(path), tensor_names(path), target)

    @classmethod
    def load_head(cls, path: str, config: C, dtype: torch.dtype, device: torch.device) -> Head[C]:
        """Raises PairRefused with the tensors' names."""
        sizes = (config.vocab_size, config.target_vocab)
        loaded = load_tensors(path, config.tensors, *sizes, dtype, device, cls.renamed)
        return Head(config, *loaded)

    @classmethod
    def read(cls, config: ReplicaConfig, target: Any) -> Self:
        """For a target of this config. Raises PairRefused, or OSError for a name not found."""
        name = config.drafting.model
        assert name is not None
        with head_of(name) as path:
            of_head = cls.read_head(path, target)
            if of_head.drafts_by_target:
                refuse_ranks(config)
        return cls(name, Head(of_head, no_storage(of_head.tensors, dtype_of(config))))

    @property
    def draft_len_max(self) -> int | None:
        return self.head.config.most

    @property
    def memory(self) -> DraftMemory:
        config, tensors = self.head.config, self.head.tensors.values()
        weights = sum(tensor.nbytes for tensor in tensors)
        seen = len(config.aux_layers)
        return DraftMemory(weights, ModelShape.of(config), seen, copies_context=self.copies_context)

    def load(self, config: ReplicaConfig, device: torch.device) -> Self:
        with head_of(self.name) as path:
            head = self.load_head(path, self.head.config, dtype_of(config), device)
        return replace(self, head=head)

    def cache(
        self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan
    ) -> tuple[PagedCache, AttentionBackend]:
        """A new one of the head's layers, and the attention over it. Raises PairRefused."""
        sizes, on_host = ModelShape.of(self.head.config), computes_on_host(config, target.device)
        cache = cache_of(sizes.attention, config, plan.cache_blocks, plan.pair.context_len, target)
        return cache, attention_over(cache, Arithmetic(), on_host)
