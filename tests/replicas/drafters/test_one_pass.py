"""Proves that a one-pass head (DFlash, DSpark) drafts what its equations say, whichever format it
comes in and however its rows came about, that its blocks are written nowhere, and that a checkpoint
that does not fit is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from replicas.config import ReplicaConfig
from replicas.drafters import DraftRequest
from replicas.drafters.backlog import TOGETHER
from replicas.drafters.one_pass import OnePassSource, drafter as module, layers as layers_module
from replicas.drafters.one_pass.head_config import one_pass_config
from replicas.errors import PairRefused
from replicas.memory import plan_memory
from replicas.sampling import SamplingBatch, choose
from replicas.stopwatch import Stopwatch
from scheduler.messages import Sampling
from tests.replicas.one_pass_heads import (
    SLIDING,
    TARGET_VOCAB,
    VOCAB,
    PlainOnePass,
    one_pass_replica,
    said,
    save_one_pass,
)
from tests.replicas.pool import Client, failing_pass, prompt
from tests.replicas.told_rows import ToldRows, drafter_in_float64, hidden_states, plain_target
from tests.tiny_pairs import DEVICE, target_model, tiny_pair

CPU = torch.device("cpu")
TARGET = target_model("llama").config
WINDOWS = {"windows": (6, None)}
CAUSAL_WINDOWS = {**WINDOWS, "causal": (True, False)}
MARKOV = {"markov_rank": 5, "enable_confidence_head": True, "confidence_head_with_markov": True}
HEADS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (said("z_lab"), {"first": 1}, {}),
    (said("z_lab", **SLIDING), {"first": 1, **CAUSAL_WINDOWS}, {}),
    (said("z_lab", is_causal=True), {"first": 1, "causal": (True, True)}, {}),
    (said("z_lab", dflash_config={"causal": False}, **SLIDING), {"first": 1, **WINDOWS}, {}),
    (
        said(
            "z_lab", input_embedding_scale=3.0, output_multiplier=0.5, final_logit_softcapping=2.0
        ),
        {"first": 1},
        {},
    ),
    (said("deepspec", rope_theta=500.0), {"first": 0}, {}),
    (said("deepspec", **MARKOV, attention_bias=True), {"first": 0}, {}),
    (said("deepspec", **MARKOV, markov_head_type="gated"), {"first": 0}, {}),
    (
        said("deepspec", **MARKOV, markov_head_type="rnn", **SLIDING),
        {"first": 0, **CAUSAL_WINDOWS},
        {},
    ),
    (said("dflash", **SLIDING), {"first": 1, **CAUSAL_WINDOWS}, {}),
    (said("dflash", sliding_window_non_causal=True, **SLIDING), {"first": 1, **WINDOWS}, {}),
    (said("dflash", draft_vocab_size=TARGET_VOCAB, sample_from_anchor=True), {"first": 0}, {}),
    (said("dspark", **MARKOV), {"first": 0}, {}),
    (
        said("dspark", **MARKOV, markov_head_type="gated", sample_from_anchor=False),
        {"first": 1},
        {},
    ),
    (
        said("dspark", **MARKOV, markov_head_type="rnn", hidden_size=24, target_hidden_size=32),
        {"first": 0},
        {"mask_embedding": torch.linspace(-1, 1, 24)},
    ),
]
"""What a config.json says, what that means, and tensors beside."""


def plain(path: str, whole: dict[str, Any], meaning: dict[str, Any]) -> PlainOnePass:
    tensors = load_file(Path(path) / "model.safetensors")
    return PlainOnePass(whole, tensors, plain_target(), **meaning)


def aux_layers(whole: dict[str, Any]) -> list[int]:
    if "speculators_model_type" in whole:
        return list(whole["aux_hidden_state_layer_ids"])
    keys = {**whole, **whole.get("dflash_config", {})}
    return [number + 1 for number in keys["target_layer_ids"]]


def told_rows(path: str, lengths: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> ToldRows:
    """Of a drafter in float64 with this head."""
    of_head = OnePassSource.read_head(path, TARGET)
    source = OnePassSource(path, OnePassSource.load_head(path, of_head, torch.float64, CPU))
    drafter: Any = drafter_in_float64(source)
    return ToldRows(drafter, drafter._layers.cache, module, lengths, monkeypatch)


@pytest.mark.parametrize(("whole", "meaning", "tensors"), HEADS, ids=count())
def test_logits_are_those_of_the_equations(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: dict[str, Any],
    meaning: dict[str, Any],
    tensors: dict[str, Any],
) -> None:
    """Within 1e-9 in float64, of rows of several lengths: after prefill in chunks, steps with and
    without drafts, and a batch that failed; a block is written nowhere."""
    monkeypatch.setattr(layers_module, "COPIED_MOST", 2000)  # rows go in several parts
    path = save_one_pass(tmp_path, TARGET, whole, **tensors)
    head, rows = plain(path, whole, meaning), told_rows(path, (1, 2, 9, 23), monkeypatch)

    def compare(k: int) -> None:
        drafts, logits = rows.propose(k)
        most = whole["block_size"] - head.first
        assert rows.lens == [min(asked, most) for asked in rows.asked]
        k = min(k, most)
        assert len(logits) == k
        for row, content in enumerate(rows.contents):
            hidden = torch.cat(hidden_states(content, aux_layers(whole)), -1)
            block = head.block(hidden, content[-1])
            before = [content[-1], *drafts[row][: k - 1]]
            torch.testing.assert_close(
                logits[:, row], head.logits(block, before), rtol=0, atol=1e-9
            )
            assert drafts[row] == head.greedy(hidden, content[-1], k)

    rows.prefill(chunk=7)
    compare(2)
    rows.check(1, 3, 2, 1)
    rows.check(2, 1, 1, 3)
    compare(9)
    for _ in range(TOGETHER):
        rows.check(1, 1, 2, 1, drafted=0)
    valid = [rows.drafter.valid(id) for id in rows.ids]
    assert all(length - 1 - at < TOGETHER for length, at in zip(rows.lengths, valid, strict=True))
    rows.check(2, 2, 2, 2)
    rows.take_back([length - 1 for length in rows.lengths])
    compare(3)
    rows.take_back([length - 6 for length in rows.lengths])
    rows.check(1, 2, 1, 4)
    compare(3)


@pytest.mark.parametrize("which", [0, 8, 12])
def test_a_sampled_row_drafts_what_the_target_would_choose_with_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    whole, meaning, tensors = HEADS[which]
    path = save_one_pass(tmp_path, TARGET, whole, **tensors)
    head, rows = plain(path, whole, meaning), told_rows(path, (3, 9, 14), monkeypatch)
    rows.prefill(chunk=100)
    sampling = [Sampling(1.5, seed=3), Sampling(), Sampling(0.8, seed=4)]
    drafts, logits = rows.propose(3, sampling)
    greedy = rows.propose(3)[0]
    assert drafts[1] == greedy[1]
    assert drafts[0] != greedy[0]
    for row, params in enumerate(sampling):
        batch = SamplingBatch.of([params], CPU)
        noise = batch.noise_after(torch.arange(4)[None] + rows.lengths[row] - 1)
        for j in range(3):
            of_target = torch.full((1, 1, TARGET_VOCAB), -torch.inf)
            of_target[..., head.ids] = logits[j, row].float()
            column = None if noise is None else noise.columns(j, j + 1)
            assert int(choose(of_target, batch, column)) == drafts[row][j]


class Headed(Client):
    """A client of a replica whose head lies at this path."""

    def __init__(
        self, path: str, head: PlainOnePass, layers: list[int], **settings: object
    ) -> None:
        super().__init__(one_pass_replica(path, **settings))
        self._head, self._hidden = head, layers

    def check_drafts(self, k: int) -> None:
        """What the drafter proposes now for every row is what the equations say."""
        blocks, drafter = self.replica.blocks, self.replica.drafter
        ids, contents = list(self.contents), list(self.contents.values())
        for row_id, content in self.contents.items():
            blocks.grow(row_id, len(content) + k)
        device = torch.device(DEVICE)
        batch = SamplingBatch.of([Sampling()] * len(ids), device)
        request = DraftRequest(ids, contents, [k] * len(ids), batch, blocks.table(ids, device))
        assert drafter is not None
        with torch.inference_mode():
            proposal = drafter.propose(request, Stopwatch(device))
        expected = []
        for content in contents:
            hidden = torch.cat(hidden_states(content, self._hidden), -1)
            expected.append(self._head.greedy(hidden, content[-1], k))
        assert proposal.tokens.t().tolist() == expected


@pytest.fixture
def client(tmp_path: Path) -> Headed:
    """With a gated DSpark head whose blocks are longer than the replica's."""
    whole = said("dspark", **MARKOV, markov_head_type="gated", block_size=7)
    path = save_one_pass(tmp_path, TARGET, whole)
    return Headed(path, plain(path, whole, {"first": 0}), aux_layers(whole))


def test_a_replica_drafts_so_from_batch_to_batch(client: Headed) -> None:
    client.prefill(new=60, a=prompt(23), b=prompt(2), c=prompt(9), d=prompt(1))
    for k, n in ((0, 2), (3, 2), (9, 1), (2, 3), (0, TOGETHER + 2)):
        client.steps(k, n)
        client.check_drafts(4)
    client.steps(4, 2, b=0, c=1)
    client.check_drafts(4)
    client.check()


def test_a_failed_batch_costs_nothing_but_itself(client: Headed) -> None:
    client.prefill(new=60, a=prompt(9), b=prompt(4))
    client.steps(3)
    with pytest.raises(RuntimeError), failing_pass(client.replica, 3):
        client.steps(3, 5)
    client.check_drafts(4)
    assert [row.draft_tokens for row in client.steps(3).rows] == [3, 3]
    client.steps(0, 2)
    with pytest.raises(RuntimeError), failing_pass(client.replica, 3):
        client.steps(0, 5)
    client.check_drafts(4)
    client.check()


@pytest.mark.parametrize("shared", [8, 9, 11, 19])
def test_a_restored_prefix_has_its_keys_and_values(client: Headed, shared: int) -> None:
    """Also where the first row's blocks have drafted since: no block of it is spoiled."""
    first = prompt(20)
    client.prefill(new=40, a=first)
    client.steps(3, 3)
    second = [*first[:shared], *((token + 1) % TARGET_VOCAB for token in first[shared:])]
    found = client.prefill(new=40, b=second).rows[0].reused
    assert found == (shared - 1) // 4 * 4
    client.check_drafts(4)
    client.steps(3, 3)
    client.check_drafts(4)
    client.check()


# ------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        (said("hass"), "speculators_model_type: 'hass'"),
        ({**said("z_lab"), "architectures": ["DFlash2DraftModel"]}, "architectures: 'DFlash2"),
        ({**said("z_lab"), "architectures": None}, "architectures: None"),
        (said("deepspec", projector_type="domino"), "projector_type: 'domino'"),
        (said("dflash", shift_label=True), "shift_label"),
        ({**said("z_lab"), "model_type": "llama"}, "model_type: layers of kind 'llama'"),
        ({**said("z_lab"), "hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        (said("deepspec", target_hidden_size=64), "target_hidden_size: 64, but .* 32 wide"),
        (said("z_lab", num_target_layers=36), "num_target_layers: 36, but the target has 3"),
        (said("z_lab", dflash_config={"target_layer_ids": None}), "target_layer_ids is missing"),
        (said("dflash", aux_hidden_state_layer_ids=[]), "aux_hidden_state_layer_ids is missing"),
        (
            said("dflash", aux_hidden_state_layer_ids=[2, 3]),
            r"_ids: \[2, 3\]: must be below the last of the target's 3 layers",
        ),
        (said("dflash", aux_hidden_state_layer_ids=[-1, 1]), r"_ids: \[-1, 1\]: must be below"),
        (said("deepspec", target_layer_ids=[0, 2]), r"target_layer_ids: \[0, 2\]: must be below"),
        (said("deepspec", target_layer_ids=[-2]), r"target_layer_ids: \[-2\]: must be below"),
        (said("deepspec", mask_token_id=None), "mask_token_id is missing"),
        (
            said("deepspec", mask_token_id=97),
            "mask_token_id: 97: must be one of the target's 97 tokens",
        ),
        (said("z_lab", block_size=None), "block_size is missing"),
        (said("z_lab", block_size=1), "block_size: 1 leaves no draft token"),
        (said("deepspec", markov_rank=4, markov_head_type="tree"), "markov_head_type: 'tree'"),
        (
            {**said("z_lab"), "layer_types": ["sliding_attention"] * 2},
            "sliding_window: must be given",
        ),
        (said("z_lab", hidden_size=24, target_hidden_size=32), "embed_tokens.weight is missing"),
        (said("z_lab", draft_vocab_size=VOCAB), "lm_head.weight is missing"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(whole: dict[str, Any], message: str) -> None:
    own = whole.get("architectures") not in (["DFlashDraftModel"], None)
    own = own or "speculators_model_type" in whole
    names = {"embed_tokens.weight", "lm_head.weight"} if own else set()
    with pytest.raises(PairRefused, match=message):
        one_pass_config(whole, names, TARGET)


@pytest.mark.parametrize(
    ("whole", "tensors", "message"),
    [
        (said("z_lab"), {"norm.weight": None}, "^norm.weight is missing$"),
        (
            said("z_lab"),
            {"layers.2.norm.weight": torch.ones(2)},
            "layers.2.norm.weight is not known",
        ),
        (
            said("z_lab"),
            {"fc.weight": torch.ones(32, 96)},
            r"fc.weight is \[32, 96\], not \[32, 64\]",
        ),
        (
            said("deepspec"),
            {"markov_head.markov_w1.weight": torch.ones(97, 5)},
            "markov_head.markov_w1.weight is not known",
        ),
        (said("dspark", **MARKOV), {"confidence_head.proj.bias": None}, "proj.bias is missing"),
        (
            said("dspark", **MARKOV),
            {"markov_head.markov_w2.weight": torch.ones(97, 5)},
            r"markov_w2.weight is \[97, 5\], not \[61, 5\]",
        ),
        (said("dflash"), {"d2t": None, "t2d": None}, "d2t is missing: the head has 61 tokens"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, whole: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    path = save_one_pass(tmp_path, TARGET, whole, **tensors)
    with pytest.raises(PairRefused, match=message):
        OnePassSource.load_head(path, OnePassSource.read_head(path, TARGET), torch.float32, CPU)


def test_ranks_refuse_a_head_that_needs_the_targets_output_matrix(tmp_path: Path) -> None:
    path = save_one_pass(tmp_path, TARGET, said("z_lab"))
    drafting = {"method": "dflash", "model": path}
    for ranks, refused in ((1, False), (2, True)):
        config = ReplicaConfig(device="cpu", speculative_config=drafting, tensor_parallel=ranks)
        if refused:
            with pytest.raises(PairRefused, match=r"^speculative_config.model: .*_parallel: "):
                OnePassSource.read(config, TARGET)
        else:
            OnePassSource.read(config, TARGET)


def test_memory_is_planned_for_the_head_that_will_be_loaded(tmp_path: Path) -> None:
    path = save_one_pass(tmp_path, TARGET, said("dspark", **MARKOV))
    config = ReplicaConfig(
        device="cpu",
        block_size=4,
        num_gpu_blocks_override=64,
        speculative_config={"method": "dspark", "model": path},
    )
    source = OnePassSource.read(config, TARGET)
    head = OnePassSource.load_head(path, source.head.config, torch.float32, CPU)
    assert source.memory.weights == 4 * sum(map(prod, source.head.config.tensors.values()))
    assert source.memory.weights == sum(tensor.nbytes for tensor in head.tensors.values())
    shape = dataclasses.replace(tiny_pair("llama"), draft=source).shape
    plan = plan_memory(config, shape, CPU, loaded=True)
    assert shape.draft.model is not None
    layers = shape.target.kv_numbers + shape.draft.model.kv_numbers
    assert plan.block_bytes == 4 * 4 * layers
    less = dataclasses.replace(shape.draft, copies_context=False)
    plain = plan_memory(config, dataclasses.replace(shape, draft=less), CPU, loaded=True)
    row = plan.pair.context_len * shape.draft.model.kv_numbers
    assert plan.buffers.step - plain.buffers.step == 3 * 4 * min(plan.work.rows * row, 1 << 24)
