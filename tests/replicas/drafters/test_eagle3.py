"""Proves that an EAGLE-3 head drafts what its equations say, whichever format it comes in and
however its rows came about, and that a checkpoint that does not fit is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import cache
from itertools import count, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.drafters import DraftRequest
from replicas.drafters.backlog import TOGETHER
from replicas.drafters.eagle3 import Eagle3Source
from replicas.drafters.eagle3.head_config import Eagle3Config, eagle3_config
from replicas.errors import PairRefused
from replicas.memory import plan_memory
from replicas.sampling.choice import SamplingBatch
from replicas.stopwatch import Stopwatch
from scheduler.messages import Sampling
from tests.replicas.heads import TARGET_VOCAB, headed_replica, plain_head, said, save_head
from tests.replicas.pool import Client, failing_pass, prompt
from tests.tiny_pairs import DEVICE, target_model, tiny_pair

CPU = torch.device("cpu")
TARGET = target_model("llama").config
WIRINGS = [
    {},
    {"norm_before_residual": True, "attention_bias": True},
    {"norm_before_fc": True, "rope_theta": 500.0},
    {"fc_norm": True, "norm_output": True},
]
FORMATS = [(False, True), (False, False), (True, False)]
"""Of speculators or the original, pickled or not."""
LEFT = {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(97, 32)}
"""What training leaves behind, which is ignored."""


class Headed(Client):
    """A client of a replica whose head lies at this path."""

    def __init__(self, path: str, **settings: object) -> None:
        super().__init__(headed_replica(path, **settings))
        self.path = path
        target: Any = self.replica.target
        forward, last = target.forward, []

        def overwriting(*given: Any) -> Any:
            """As a recording, which writes where the last result is."""
            for states in last:
                states.zero_()
            out = forward(*given)
            last[:] = out.aux_hidden_states
            return out

        target.forward = overwriting

    def check_drafts(self, k: int) -> None:
        """What the drafter proposes now for every row is what the equations say."""
        blocks, drafter = self.replica.blocks, self.replica.drafter
        ids, contents = list(self.contents), list(self.contents.values())
        for row_id, content in self.contents.items():
            blocks.grow(row_id, len(content) + k)
        device = torch.device(DEVICE)
        sampling = SamplingBatch.of([Sampling()] * len(ids), device)
        table = blocks.table(ids, device)
        request = DraftRequest(
            ids, contents, [k] * len(ids), sampling, table, token_most=TARGET_VOCAB
        )
        assert drafter is not None
        with torch.inference_mode():
            proposal = drafter.propose(request, Stopwatch(device))
        assert list(proposal.lens) == [k] * len(ids)
        drafts = [expected(self.path, content, k) for content in contents]
        assert proposal.tokens.t().tolist() == drafts


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Of a head."""
    return save_head(tmp_path, TARGET, said(True))


@cache
def plain_target() -> PreTrainedModel:
    """A copy: asking for hidden states changes its layers."""
    return copy.deepcopy(target_model("llama"))


@cache
def plain_tensors(path: str) -> tuple[Eagle3Config, dict[str, Any]]:
    config = Eagle3Source.read_head(path, TARGET)
    head = Eagle3Source.load_head(path, config, torch.float32, CPU)
    tensors: dict[str, Any] = dict(head.tensors)
    if head.ids is not None:
        tensors["d2t"] = head.ids - torch.arange(config.vocab_size)
    return config, tensors


def expected(path: str, content: list[int], k: int) -> list[int]:
    """The same by the equations, on hidden states of transformers' own forward pass."""
    model, (config, tensors) = plain_target(), plain_tensors(path)
    with torch.no_grad():
        out = model(torch.tensor([content[:-1]]), output_hidden_states=True)
    hidden = torch.cat([out.hidden_states[states][0] for states in config.aux_layers], -1)
    embeddings = model.get_input_embeddings().weight.detach()
    told = json.loads((Path(path) / "config.json").read_text())
    theta = told.get("transformer_layer_config", told).get("rope_theta", 10_000.0)
    return plain_head(config, tensors, embeddings, hidden, content, k, theta)[0]


@pytest.mark.parametrize(
    ("whole", "own_embedding", "pickled"),
    [
        *(
            (said(FORMATS[number % 3][0], kind, **wiring), False, FORMATS[number % 3][1])
            for number, (wiring, kind) in enumerate(product(WIRINGS, ("llama", "qwen3")))
        ),
        (said(True, hidden_size=24, target_hidden_size=32, fc_norm=True), True, False),
        (
            said(False, "qwen3", hidden_size=48, target_hidden_size=32, norm_before_fc=True),
            True,
            True,
        ),
        (said(True, draft_vocab_size=TARGET_VOCAB), True, False),
    ],
    ids=count(),
)
def test_drafts_are_those_of_the_equations(
    tmp_path: Path, whole: dict[str, Any], own_embedding: bool, pickled: bool
) -> None:
    """After prefill in chunks, plain steps, drafting ones, and rows of several lengths; also of a
    head with an embedding, a width, and a vocabulary of its own."""
    path = save_head(tmp_path, TARGET, whole, own_embedding, pickled, **LEFT)
    config = Eagle3Source.read_head(path, TARGET)
    mapped = Eagle3Source.load_head(path, config, torch.float32, CPU).ids is not None
    assert mapped == (config.vocab_size < TARGET_VOCAB)
    client = Headed(path, prefill_chunk_tokens=8, plan_prefill_rows=1)
    client.prefill(new=60, a=prompt(23), b=prompt(2), c=prompt(9))
    for k, n in ((0, 2), (3, 2), (0, 1), (2, 3), (0, TOGETHER + 2)):
        client.steps(k, n)
        client.check_drafts(4)
    client.check()


def test_a_row_of_one_token_drafts_from_its_second_step_on(path: str) -> None:
    client = Headed(path)
    client.prefill(a=prompt(1), b=prompt(5))
    assert [row.draft_tokens for row in client.steps(3).rows] == [0, 3]
    assert [row.draft_tokens for row in client.steps(3).rows] == [3, 3]


def test_a_failed_batch_costs_a_row_one_plain_step(path: str) -> None:
    client = Headed(path)
    client.prefill(new=60, a=prompt(9), b=prompt(4))
    client.steps(3)
    with pytest.raises(RuntimeError), failing_pass(client.replica, 3):
        client.steps(3, 5)
    assert sum(row.draft_tokens for row in client.steps(3).rows) == 0
    assert [row.draft_tokens for row in client.steps(3).rows] == [3, 3]
    # Nor does it forget what it saw before, or remember what was taken back.
    client.steps(0, 2)
    with pytest.raises(RuntimeError), failing_pass(client.replica, 3):
        client.steps(0, 5)
    client.steps(0)
    client.check_drafts(4)


@pytest.mark.parametrize("shared", [8, 9, 11])
def test_a_shared_block_is_one_whose_next_token_is_the_same_too(path: str, shared: int) -> None:
    """The head's keys and values of a block's last position depend on the token behind it."""
    client = Headed(path)
    first = prompt(20)
    second = [*first[:shared], *((token + 1) % TARGET_VOCAB for token in first[shared:])]
    client.prefill(a=first)
    found = client.prefill(b=second).rows[0].reused
    assert found == (shared - 1) // 4 * 4
    client.check_drafts(4)


@pytest.mark.parametrize("graphs", ["on", "off"])
def test_a_row_that_cannot_draft_keeps_what_it_has_beside_one_that_does(
    path: str, graphs: str
) -> None:
    client = Headed(path, graphs=graphs, plan_rows=2, plan_draft_len=3)
    client.prefill(new=60, a=prompt(9), b=prompt(4))
    client.steps(3)
    with pytest.raises(RuntimeError), failing_pass(client.replica, 3):
        client.steps(3, 5, ["a"])
    assert [row.draft_tokens for row in client.steps(3).rows] == [0, 3]
    client.check_drafts(4)


def test_rows_of_unequal_drafts_show_the_head_what_was_accepted(path: str) -> None:
    client = Headed(path)
    client.prefill(new=60, a=prompt(9), b=prompt(4))
    for own in ({"a": 0}, {"b": 1}, {"b": 0}, {}):
        client.steps(3, 2, **own)
        client.check_drafts(3)


# ------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("ids", "aux_layers"), [(None, (2, 1, 0)), ([2, 0, 1], (2, 0, 1)), ([1, 0], (2, 1))]
)
def test_hidden_states_are_numbered_as_transformers_does(
    ids: list[int] | None, aux_layers: tuple[int, ...]
) -> None:
    """Ids that begin with 1 count layers, and mean what these put out."""
    keys = {"eagle_aux_hidden_state_layer_ids": ids}
    assert eagle3_config(said(True, **keys), {"d2t"}, TARGET).aux_layers == aux_layers
    nested = said(False, eagle_config={"use_aux_hidden_state": True, **keys})
    assert eagle3_config(nested, {"d2t"}, TARGET).aux_layers == aux_layers


def test_what_a_config_does_not_say() -> None:
    config = eagle3_config(said(True), {"d2t"}, TARGET)
    assert not config.norm_before_residual
    assert config.layer.rope_parameters["rope_theta"] == 10_000.0


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        (said(True, speculators_model_type="hass"), "speculators_model_type: 'hass'"),
        (said(False, "gpt2"), "model_type: layers of kind 'gpt2'"),
        (said(False, num_hidden_layers=2), "num_hidden_layers: 2"),
        (said(False, hidden_act="gelu"), "hidden_act: 'gelu'"),
        (said(False, target_hidden_size=64), "target_hidden_size: 64, but the target is 32 wide"),
        (said(False, hidden_size=64, target_hidden_size=32), "embed_tokens.weight is missing"),
        (said(False, eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        (said(True, eagle_aux_hidden_state_layer_ids=[2, 3]), r"layer_ids: \[2, 3\]: .* 3 layers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(whole: dict[str, Any], message: str) -> None:
    with pytest.raises(PairRefused, match=message):
        eagle3_config(whole, {"d2t"}, TARGET)


@pytest.mark.parametrize("speculators", [False, True])
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"norm.weight": None}, "^norm.weight is missing$"),
        ({"layers.0.self_attn.q_norm.weight": torch.ones(8)}, "q_norm.weight is not known"),
        ({"fc.weight": torch.ones(32, 64)}, r"fc.weight is \[32, 64\], not \[32, 96\]"),
        ({"d2t": None, "t2d": None}, "d2t is missing: the head has 61 tokens of 97"),
        ({"d2t": torch.full((61,), 50)}, "d2t leads beyond the target's 97 tokens"),
        ({"d2t": torch.zeros(61, dtype=torch.int64)}, "t2d does not mark"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, speculators: bool, tensors: dict[str, Any], message: str
) -> None:
    path = save_head(tmp_path, TARGET, said(speculators), **tensors)
    with pytest.raises(PairRefused, match=message):
        Eagle3Source.load_head(path, Eagle3Source.read_head(path, TARGET), torch.float32, CPU)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("config.json", b'"\xff"'),
        ("model.safetensors", b""),
        ("model.safetensors", None),
    ],
)
def test_a_file_that_is_broken_is_refused_by_name(
    tmp_path: Path, path: str, name: str, content: bytes | None
) -> None:
    """None: it ends too early."""
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(PairRefused, match=f"^{name}: "):
        Eagle3Source.read_head(path, TARGET)


def test_memory_is_planned_for_the_head_that_will_be_loaded(path: str) -> None:
    config = Eagle3Source.read_head(path, TARGET)
    head = Eagle3Source.load_head(path, config, torch.float32, CPU)
    shape = dataclasses.replace(tiny_pair("llama"), draft=Eagle3Source(path, head)).shape
    assert shape.draft.weights == 4 * sum(map(prod, config.tensors.values()))
    settings = ReplicaConfig(device="cpu", block_size=4, num_gpu_blocks_override=64)
    plan = plan_memory(settings, shape, CPU, loaded=True)
    assert shape.draft.model is not None
    assert shape.draft.model.layers == 1
    layers = shape.target.kv_numbers + shape.draft.model.kv_numbers
    assert plan.block_bytes == 4 * 4 * layers
