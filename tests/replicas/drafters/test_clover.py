"""Proves that a Clover-2 head drafts what its equations say however its rows came about, that
drafted tokens never enter its cache, and that a checkpoint that does not fit is refused by name."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from replicas.config import ReplicaConfig
from replicas.drafters import DraftRequest
from replicas.drafters.backlog import TOGETHER
from replicas.drafters.clover import CloverSource, drafter as module
from replicas.drafters.clover.head_config import clover_config
from replicas.errors import PairRefused
from replicas.memory import plan_memory
from replicas.sampling import SamplingBatch, choose
from replicas.stopwatch import Stopwatch
from scheduler.messages import Sampling
from tests.replicas.clover_heads import clover_replica, plain_clover, said, save_clover
from tests.replicas.pool import Client, failing_pass, prompt
from tests.replicas.told_rows import ToldRows, drafter_in_float64, hidden_states, plain_target
from tests.tiny_pairs import DEVICE, VOCAB, target_model, tiny_pair

CPU = torch.device("cpu")
TARGET = target_model("llama").config
MATRICES = {
    "clover_embed_tokens.weight": torch.randn(97, 32, generator=torch.Generator().manual_seed(1)),
    "lm_head.weight": torch.randn(97, 32, generator=torch.Generator().manual_seed(2)),
}


def logits_of(path: str, whole: dict[str, Any], content: list[int], drafts: list[int]) -> Any:
    """By the equations, on hidden states of transformers' own forward pass."""
    tensors = load_file(Path(path) / "model.safetensors")
    lm_head = plain_target().get_output_embeddings().weight.detach()
    (hidden,) = hidden_states(content, [TARGET.num_hidden_layers])
    return plain_clover(whole, tensors, lm_head, hidden, content, drafts)


def told_rows(path: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> ToldRows:
    """Of a drafter in float64 with this head."""
    head = CloverSource.load_head(path, CloverSource.read_head(path, TARGET), torch.float64, CPU)
    drafter = drafter_in_float64(CloverSource(path, head))
    return ToldRows(drafter, drafter._layers.backend.cache, module, lengths, monkeypatch)


@pytest.mark.parametrize(
    ("whole", "copies"),
    [
        (said(), False),
        (said(rope_theta=500.0, clover={"num_layers": 1, "num_heads": 4}), True),
        (said(num_key_value_heads=4, clover={"num_layers": 3}), False),
    ],
)
def test_logits_are_those_of_the_equations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, Any], copies: bool
) -> None:
    """Within 1e-9 in float64, of rows of several lengths: after prefill in chunks, steps with and
    without drafts, and a batch that failed."""
    path = save_clover(tmp_path, TARGET, whole, copies, **(MATRICES if copies else {}))
    rows = told_rows(path, (2, 9, 23, 1), monkeypatch)
    most = whole["clover"]["num_heads"]

    def compare(k: int, *absent: int) -> None:
        drafts, logits = rows.propose(k)
        for row, content in enumerate(rows.contents):
            if row in absent:
                assert rows.lens[row] == 0
                continue
            assert rows.lens[row] == min(rows.asked[row], most)
            drafted = drafts[row][: min(k, most)]
            expected = logits_of(path, whole, content, drafted[:-1])
            torch.testing.assert_close(logits[:, row], expected, rtol=0, atol=1e-9)
            assert drafted == expected.argmax(-1).tolist()

    rows.prefill(chunk=7)
    compare(2, 3)
    rows.check(1, 3, 2, 1)
    rows.check(2, 1, 1, 3)
    compare(9)
    for _ in range(TOGETHER):
        rows.check(1, 1, 2, 1, drafted=0)
    valid = [rows.drafter.valid(id) for id in rows.ids]
    assert all(length - 1 - at < TOGETHER for length, at in zip(rows.lengths, valid, strict=True))
    rows.check(2, 2, 2, 2)
    rows.take_back([length - 1 for length in rows.lengths])
    compare(5)
    rows.take_back([length - 6 for length in rows.lengths])
    compare(5, 0, 1, 2, 3)
    rows.check(1, 2, 1, 4)
    compare(5)


def test_a_sampled_row_drafts_what_the_target_would_choose_with_its_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = told_rows(save_clover(tmp_path, TARGET, said()), (3, 9, 14), monkeypatch)
    rows.prefill(chunk=100)
    sampling = [Sampling(1.5, seed=3), Sampling(), Sampling(0.8, seed=4)]
    drafts, logits = rows.propose(3, sampling)
    assert drafts[0] != rows.propose(3)[0][0]
    for row, params in enumerate(sampling):
        batch = SamplingBatch.of([params], CPU)
        noise = batch.noise_after(torch.arange(4)[None] + rows.lengths[row] - 1)
        for j in range(3):
            column = None if noise is None else noise.columns(j, j + 1)
            of_target = logits[j, row].float()[None, None]
            assert int(choose(of_target, batch, column)) == drafts[row][j]


class Headed(Client):
    """A client of a replica whose head lies at this path."""

    def __init__(self, path: str, architecture: str = "llama") -> None:
        super().__init__(clover_replica(path, tiny_pair(architecture)))
        self._path = path

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
        assert list(proposal.lens) == [k] * len(ids)
        for content, drafts in zip(contents, proposal.tokens.t().tolist(), strict=True):
            expected = logits_of(self._path, said(), content, drafts[:-1])
            assert drafts == expected.argmax(-1).tolist()


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Of a head."""
    return save_clover(tmp_path, TARGET, said())


def test_a_replica_drafts_so_from_batch_to_batch(path: str) -> None:
    client = Headed(path)
    client.prefill(new=60, a=prompt(23), b=prompt(2), c=prompt(9))
    for k, n in ((0, 2), (3, 2), (9, 1), (2, 3), (0, TOGETHER + 2)):
        client.steps(k, n)
        client.check_drafts(4)
    client.steps(4, 2, b=0, c=1)
    client.check_drafts(4)
    client.check()


def test_a_failed_batch_costs_a_row_one_plain_step_at_most(path: str) -> None:
    client = Headed(path)
    client.prefill(new=60, a=prompt(9), b=prompt(4))
    client.steps(3)
    with pytest.raises(RuntimeError), failing_pass(client.replica, 3):
        client.steps(3, 5)
    client.steps(3)
    client.check_drafts(4)
    client.check()


@pytest.mark.parametrize("shared", [8, 9, 11, 19])
def test_a_restored_prefix_has_its_keys_and_values(path: str, shared: int) -> None:
    client = Headed(path)
    first = prompt(20)
    client.prefill(new=40, a=first)
    client.steps(3, 3)
    second = [*first[:shared], *((token + 1) % VOCAB for token in first[shared:])]
    found = client.prefill(new=40, b=second).rows[0].reused
    assert found == (shared - 1) // 4 * 4
    client.check_drafts(4)
    client.steps(3, 3)
    client.check_drafts(4)
    client.check()


@pytest.mark.parametrize("architecture", ["qwen3", "glm4"])
def test_it_sees_other_targets_before_their_last_norm(tmp_path: Path, architecture: str) -> None:
    """Also a model that keeps its own layers: both say the same."""
    from replicas.models.paged_model import ForwardOptions, PagedModel
    from tests.tiny_pairs import unrecorded

    target = target_model(architecture).config
    replica = clover_replica(save_clover(tmp_path, target, said()), tiny_pair(architecture))
    joined = unrecorded(replica.target)  # type: ignore[arg-type]
    own = PagedModel(joined.model, joined.cache, joined.backend, joined.arithmetic)
    table = torch.arange(1, 4)[None]
    layers = target.num_hidden_layers
    with torch.inference_mode():
        seen = [
            model.forward(
                torch.arange(9),
                model.backend.step_layout(table, [0], 9).window(0, 9),
                ForwardOptions(aux_layers=(1, layers)),
            )
            for model in (joined, own)
        ]
        normed = target_model(architecture).model.norm(seen[1].aux_hidden_states[1])
        logits = target_model(architecture).lm_head(normed)
    torch.testing.assert_close(logits, seen[1].logits, rtol=1e-4, atol=1e-4)
    for hidden, other in zip(seen[0].aux_hidden_states, seen[1].aux_hidden_states, strict=True):
        torch.testing.assert_close(hidden, other, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ({**said(), "clover": None}, "clover: must be given"),
        (said(clover={"num_layers": 0}), "clover.num_layers: must be 1 or more, is 0"),
        (said(clover={"num_heads": None}), "clover.num_heads: must be 1 or more, is None"),
        (said(model_type="qwen3"), "model_type: layers of kind 'qwen3'"),
        (said(hidden_act="gelu"), "hidden_act: 'gelu'"),
        (said(attention_bias=True), "attention_bias"),
        (said(hidden_size=64), "hidden_size: 64, but the target is 32 wide"),
        (said(vocab_size=61), "vocab_size: 61, but the target has 97 tokens"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(whole: dict[str, Any], message: str) -> None:
    with pytest.raises(PairRefused, match=message):
        clover_config(whole, (), TARGET)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"clover_norm.weight": None}, "^clover_norm.weight is missing$"),
        (
            {"layers.2.mlp.up_proj.weight": torch.ones(2)},
            "layers.2.mlp.up_proj.weight is not known",
        ),
        (
            {"clover_head_mlp2.weight": torch.ones(32, 32)},
            r"clover_head_mlp2.weight is \[32, 32\], not \[32, 64\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    path = save_clover(tmp_path, TARGET, said(), **tensors)
    with pytest.raises(PairRefused, match=message):
        CloverSource.load_head(path, CloverSource.read_head(path, TARGET), torch.float32, CPU)


def test_memory_is_planned_for_the_head_that_will_be_loaded(path: str) -> None:
    config = ReplicaConfig(
        device="cpu",
        block_size=4,
        num_gpu_blocks_override=64,
        speculative_config={"method": "clover", "model": path},
    )
    source = CloverSource.read(config, TARGET)
    assert source.memory.weights == 4 * sum(map(prod, source.head.config.tensors.values()))
    shape = dataclasses.replace(tiny_pair("llama"), draft=source).shape
    plan = plan_memory(config, shape, CPU, loaded=True)
    assert shape.draft.model is not None
    layers = shape.target.kv_numbers + shape.draft.model.kv_numbers
    assert plan.block_bytes == 4 * 4 * layers
    split = config.model_copy(update={"tensor_parallel": 2})
    with pytest.raises(PairRefused, match=r"^speculative_config.model: .*tensor_parallel: "):
        CloverSource.read(split, TARGET)
