"""A drafter that is a smaller language model with a KV cache of its own in the same block table.

It proposes with the target's rule and the target's noise, so that it agrees as often as its
distribution does (drafter-invariant coupling, arXiv 2408.07978). It needs tokens alone: rows that
steps without drafting left behind are filled before it drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from replicas.config import DRAFTING_FIELD, ReplicaConfig
from replicas.cuda import GraphedModel
from replicas.drafters.protocol import Drafter, DraftRequest, DraftSource, Observation, Proposal
from replicas.errors import PairRefused
from replicas.kv_cache import TokenRange
from replicas.memory import DraftMemory, MemoryPlan
from replicas.models import (
    ALL,
    ForwardOptions,
    Model,
    ModelShape,
    build_model,
    dtype_name,
    load_config,
    load_model,
    prefill,
    resolve,
    weight_bytes,
    without_storage,
)
from replicas.names import is_planted
from replicas.sampling import guess
from replicas.stopwatch import Stopwatch


class ModelDrafter:
    """Drafts token by token; its KV of a row is valid for at least length - 2 positions when it
    drafts."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: Model, name: str, pass_tokens: int) -> None:
        """`pass_tokens`: tokens of one prefill pass at most."""
        self.name = name
        self.model = model
        self._pass_tokens = pass_tokens
        self._valid: dict[str, int] = {}
        """Valid KV positions of each row."""

    def begin(self, row: str, tokens: Sequence[int], salt: str, prefilled: int) -> None:
        self._valid[row] = prefilled

    def end(self, row: str) -> None:
        self._valid.pop(row, None)

    def valid(self, row: str) -> int | None:
        return self._valid[row]

    def observe(self, observed: Observation) -> None:
        if observed.drafted is None:
            self._prefill(observed.ids, observed.contents, observed.ranges, observed.table)
        elif (k := max(observed.drafted)) > 0:
            for index, (_, end) in enumerate(observed.ranges):
                # Drafting fed all proposed tokens but the last one.
                fed = len(observed.contents[index]) + min(observed.drafted[index], k - 1)
                self._valid[observed.ids[index]] = min(end, fed)

    def rollback(self, rows: Sequence[str], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self._valid[row] = min(self._valid[row], length - 1)

    def propose(self, request: DraftRequest, watch: Stopwatch) -> Proposal:
        self._catch_up(request, watch)
        rows, k, model = len(request.ids), request.k, self.model
        device = request.table.device
        # After a step that accepted everything two positions are missing, else one: feeding two
        # always keeps shapes fixed, and the second writes what is there already.
        starts = [len(content) - 2 for content in request.contents]
        layout = model.backend.step_layout(request.table, starts, k + 1)
        # An id that only the target has, padding of its embedding, is fed as the last one.
        most = model.vocab - 1
        last = [min(id, most) for content in request.contents for id in (0, *content[-2:])[-2:]]
        fed = torch.tensor(last, device=device)
        shared = min(request.token_most, model.vocab)
        kept = torch.arange(1, 2 * rows, 2, device=device)
        tokens = []
        # Not each before its pass: after a pass a processor would have to fetch the code anew.
        windows = [layout.window(j + 1 if j else 0, j + 2) for j in range(k)]
        for j, window in enumerate(windows):
            with watch.section("draft"):
                logits = model.forward(fed, window, ALL if j else ForwardOptions(kept)).logits
            assert logits is not None
            logits = logits[:, :shared]  # of ids that both have
            fed = guess(logits, request.sampling, request.noise, j)
            tokens.append(fed)
        return Proposal(torch.stack(tokens), request.draft_lens)

    def _catch_up(self, request: DraftRequest, watch: Stopwatch) -> None:
        """Fill rows that steps without drafting left behind."""
        behind = [
            index
            for index, (row, content) in enumerate(zip(request.ids, request.contents, strict=True))
            if self._valid[row] < len(content) - 2
        ]
        if not behind:
            return
        with watch.section("catch_up"):
            self._prefill(
                [request.ids[index] for index in behind],
                [request.contents[index] for index in behind],
                [(self._valid[request.ids[i]], len(request.contents[i]) - 2) for i in behind],
                request.table[behind],
            )

    def _prefill(
        self,
        ids: Sequence[str],
        contents: Sequence[Sequence[int]],
        ranges: Sequence[TokenRange],
        table: torch.Tensor,
    ) -> None:
        prefill(self.model, contents, ranges, table, self._pass_tokens)
        for row, (_, end) in zip(ids, ranges, strict=True):
            self._valid[row] = max(self._valid[row], end)


@dataclass(frozen=True)
class ModelSource(DraftSource):
    """A model of the target's vocabulary."""

    name: str
    model: PreTrainedModel
    vocab_size: int

    @classmethod
    def read(cls, config: ReplicaConfig, target: Any) -> ModelSource:
        """For a target of this config. Raises PairRefused, or OSError for a name not found."""
        name = config.drafting.model
        assert name is not None
        path = resolve(name, "draft", field=DRAFTING_FIELD)
        of_model = load_config(path, config, DRAFTING_FIELD)
        vocab_size = _check_vocabularies(resolve(config.target), path, config)
        model = without_storage(of_model, config)
        return cls(name, model, min(vocab_size, of_model.vocab_size))

    @property
    def memory(self) -> DraftMemory:
        return DraftMemory(weight_bytes(self.model), ModelShape.of_model(self.model))

    def load(self, config: ReplicaConfig, device: torch.device) -> ModelSource:
        path = resolve(self.name, "draft", dtype_name(config), DRAFTING_FIELD)
        # A planted draft always follows the map: acceptance is the target's business.
        model = load_model(path, config, device, 1.0, DRAFTING_FIELD)
        return replace(self, model=model)

    def drafter(self, target: PreTrainedModel, config: ReplicaConfig, plan: MemoryPlan) -> Drafter:
        sizes = (plan.cache_blocks, plan.pair.context_len, plan.prepack)
        model, _ = build_model(self.model, self.name, config, *sizes, exact=False)
        fixed = config.fixed_shapes(self.model.device)
        passes: Model = GraphedModel(model, plan.work.rows, [1, 2]) if fixed else model
        return ModelDrafter(passes, self.name, plan.work.pass_tokens)


def _check_vocabularies(target_path: str, draft_path: str, config: ReplicaConfig) -> int:
    """Compare token for token and the special ones; returns one more than the highest id.

    Planted models have no tokenizer: what they share is the map over their vocabulary.
    """
    if is_planted(target_path) != is_planted(draft_path):
        raise PairRefused(
            f"target {target_path} and draft {draft_path}: a planted model has no tokenizer and"
            " goes with another planted model only"
        )
    if is_planted(target_path):
        count = int(load_config(target_path, config, "target").vocab_size)
        other = int(load_config(draft_path, config, "draft").vocab_size)
        if count != other:
            raise PairRefused(
                f"target and draft have different vocabularies: {count} and {other} tokens"
            )
        return count
    remote = config.trust_remote_code
    target = AutoTokenizer.from_pretrained(target_path, trust_remote_code=remote)
    draft = AutoTokenizer.from_pretrained(draft_path, trust_remote_code=remote)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if differing := {token for token, _ in ours.items() ^ theirs.items()}:
        token = min(differing, key=lambda token: (ours.get(token, theirs.get(token)), token))
        raise PairRefused(
            f"target and draft have different vocabularies: {len(ours)} and {len(theirs)} tokens,"
            f" {len(differing)} of them differ; first {token!r}, which is"
            f" {ours.get(token, 'absent')} in the target and {theirs.get(token, 'absent')} in the"
            " draft"
        )
    for name in ("bos_token_id", "eos_token_id"):
        ours_id, theirs_id = getattr(target, name), getattr(draft, name)
        if ours_id != theirs_id:
            raise PairRefused(
                f"target and draft have different special tokens: {name} is {ours_id} in the"
                f" target and {theirs_id} in the draft"
            )
    return int(max(ours.values())) + 1
