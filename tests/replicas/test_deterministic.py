"""Proves that `deterministic` makes output bit-identical in every dtype, whatever the schedule.

The planted target strays among nearly equal logits, so rounding shows: the same requests without
the mode are run beside, and their outputs do change with the batch in bfloat16.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cluster.local_engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.deterministic import ATTENTIONS, NotDeterministic, make_deterministic
from replicas.invariance import check_invariance
from replicas.model import ATTENTION, PagedModel, register_attention
from replicas.pair import Pair, PairRefused, load_pair
from replicas.replica import Replica
from replicas.tiles import TILED, TILES, in_tiles, tiled_attention
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, SamplingParams
from tests.replicas.test_replica import Client
from tests.tiny_pairs import ARCHITECTURES, target_model, tiny_pair

DTYPES = ("bfloat16", "float16", "float32")
# With a scale there is nothing to calibrate; at this one about half of the tokens stray.
TARGET = "planted:tiny?scale=0.65&layers=2"
NEW = 20


@cache
def replica_of(
    dtype: str,
    deterministic: bool = True,
    draft: bool = True,
    sharing: bool = False,
    graphs: str = "off",
) -> Replica:
    """Without sharing, or the prompts' KV would be computed in the first run only."""
    config = ReplicaConfig(
        target=TARGET,
        draft="planted:tiny-draft" if draft else None,
        device="cpu",
        dtype=dtype,
        deterministic=deterministic,
        fuse_layers=False,
        graphs=graphs,
        block_size=4,
        kv_blocks=2048,
        prefix_sharing=sharing,
    )
    return Replica.load(config)


def prompts(n: int, vocab: int = 512) -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 60))) for _ in range(n)]


def run(
    replica: Replica,
    batch: int,
    k: int | None,
    arrival: random.Random | None = None,
    sampled: bool = False,
    n: int = 6,
) -> list[list[int]]:
    """Outputs of n requests; with `arrival` they come one by one while others run."""
    engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=k))
    requests = [
        Request(
            str(i),
            prompt,
            NEW,
            sampling=SamplingParams(temperature=1.0, top_p=0.9, seed=i)
            if sampled
            else SamplingParams(),
        )
        for i, prompt in enumerate(prompts(n))
    ]
    if arrival is None:
        return [output.tokens for output in engine.generate(requests)]
    outputs = {}
    for request in arrival.sample(requests, len(requests)):
        outputs[request.id] = engine.submit(request)
        for _ in range(arrival.randrange(4)):
            engine.advance()
    engine.run()
    return [outputs[request.id].tokens for request in requests]


SCHEDULES = [(1, 4, None), (3, 0, None), (6, 8, None), (6, 1, 2), (4, 5, 3), (2, 2, 4)]
"""Rows per batch, draft length, seed of the arrivals (None: all at once)."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_is_the_same_whatever_the_batch_the_draft_length_and_the_arrival(
    dtype: str,
) -> None:
    replica = replica_of(dtype)
    expected = run(replica, 1, 0)
    for batch, k, seed in SCHEDULES:
        arrival = None if seed is None else random.Random(seed)
        assert run(replica, batch, k, arrival) == expected, (batch, k, seed)


@pytest.mark.parametrize("sampled", [False, True])
def test_it_is_the_same_with_a_prefix_that_others_computed(sampled: bool) -> None:
    """Its KV comes from other batches, and in part from steps instead of a prefill."""
    expected = run(replica_of("bfloat16"), 1, 0, sampled=sampled)
    sharing = replica_of("bfloat16", sharing=True)
    for batch, k, seed in SCHEDULES:
        arrival = None if seed is None else random.Random(seed)
        assert run(sharing, batch, k, arrival, sampled) == expected, (batch, k, seed)
    again = [
        Request(f"again {i}", (*prompt, *tokens[:9]), NEW - 9, sampling=SamplingParams())
        for i, (prompt, tokens) in enumerate(zip(prompts(6), expected, strict=True))
    ]
    if not sampled:
        outputs = LocalEngine(sharing, SchedulerConfig()).generate(again)
        assert [output.tokens for output in outputs] == [tokens[9:] for tokens in expected]
        assert sum(output.usage.cached_tokens for output in outputs) > 100


def test_steps_in_fixed_shapes_change_nothing() -> None:
    """As a GPU records them: rows, draft length and table columns padded to buckets. Without a
    given draft length the pool chooses by what steps took here and now."""
    expected = run(replica_of("bfloat16"), 1, 0)
    replica = replica_of("bfloat16", graphs="on")
    for batch, k in ((1, 4), (5, 3), (6, 8), (6, None)):
        assert run(replica, batch, k) == expected, (batch, k)


def test_sampled_output_is_the_same_too() -> None:
    replica = replica_of("bfloat16")
    expected = run(replica, 1, 0, sampled=True)
    for batch, k, seed in ((4, 3, 1), (6, 6, None)):
        arrival = None if seed is None else random.Random(seed)
        assert run(replica, batch, k, arrival, sampled=True) == expected, (batch, k)


def test_without_the_mode_rounding_shows() -> None:
    """Else the tests above would prove nothing."""
    replica = replica_of("bfloat16", deterministic=False)
    expected = run(replica, 1, 0, n=64)
    runs = [run(replica, batch, k, n=64) for batch, k in ((8, 0), (8, 4), (5, 6))]
    assert any(outputs != expected for outputs in runs)


def test_a_draft_changes_nothing() -> None:
    with_draft = replica_of("bfloat16")
    without = replica_of("bfloat16", draft=False)
    assert run(with_draft, 6, 4) == run(without, 3, 0)


@pytest.mark.parametrize("chunk", [3, 512])
def test_a_sequence_prefilled_anew_in_the_middle_goes_on_as_it_would_have(chunk: int) -> None:
    """What a pool does after a replica was lost: committed tokens become part of the prefill."""
    config = ReplicaConfig(
        device="cpu",
        dtype="bfloat16",
        block_size=4,
        kv_blocks=2048,
        prefill_chunk_tokens=chunk,
        prefix_sharing=False,
    )
    pair = load_pair(
        config.model_copy(
            update={"target": TARGET, "draft": "planted:tiny-draft", "deterministic": True}
        )
    )
    whole = Client(Replica(pair, config))
    tokens = {f"s{i}": list(prompt) for i, prompt in enumerate(prompts(4))}
    whole.prefill(new=NEW, **tokens)
    while min(len(whole.new_tokens(name)) for name in tokens) < 16:
        whole.steps(2, 1, [name for name in tokens if len(whole.new_tokens(name)) < 16])
    for taken in (1, 5, 11):
        again = Client(Replica(pair, config))
        committed = {
            name: whole.contents[name][: len(prompt) + taken] for name, prompt in tokens.items()
        }
        again.prefill(new=NEW, **committed)
        again.steps(3, 2)
        for name in tokens:
            n = min(len(again.contents[name]), len(whole.contents[name]))
            assert n > len(committed[name])
            assert again.contents[name][:n] == whole.contents[name][:n]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_every_architecture_are_the_same_bits(architecture: str, dtype: str) -> None:
    model = copy.deepcopy(target_model(architecture)).to(getattr(torch, dtype))
    model.set_attn_implementation(ATTENTION)
    assert check_invariance(model) is not None
    make_deterministic(model)
    assert check_invariance(model) is None


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_float32_the_tokens_are_those_of_the_plain_path(architecture: str) -> None:
    plain = tiny_pair(architecture)
    target = copy.deepcopy(plain.target)
    make_deterministic(target)
    fixed = dataclasses.replace(plain, target=target)
    config = ReplicaConfig(device="cpu", block_size=4, kv_blocks=2048)
    outputs = []
    for pair in (plain, fixed):
        client = Client(Replica(pair, config))
        client.prefill(a=[5] * 9, b=list(range(3, 50)), c=[7])
        client.steps(3, 4)
        outputs.append(client.contents)
    for name, tokens in outputs[0].items():
        n = min(len(tokens), len(outputs[1][name]))
        assert tokens[:n] == outputs[1][name][:n]


# ---------------------------------------------------------------------- the trial


@pytest.fixture
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes as a GPU has them."""
    monkeypatch.setitem(TILES, "cpu", TILES["cuda"])


def planted_target(**config: object) -> PreTrainedModel:
    target = f"{TARGET}&acceptance=0.5"
    return load_pair(ReplicaConfig(target=target, draft=None, device="cpu", **config)).target


@pytest.mark.usefixtures("large_tiles")
def test_with_the_tiles_of_a_gpu_it_is_deterministic_too() -> None:
    config = ReplicaConfig(
        target=TARGET,
        draft="planted:tiny-draft",
        device="cpu",
        dtype="bfloat16",
        deterministic=True,
        kv_blocks=2048,
        prefix_sharing=False,
    )
    replica = Replica.load(config)
    client = Client(replica)
    long = list(range(2, 260))
    client.prefill(a=long, b=[5], c=list(range(9, 200)))
    client.steps(4, 3)
    alone = Client(Replica.load(config))
    alone.prefill(a=long)
    alone.steps(0, 9)
    n = min(len(client.contents["a"]), len(alone.contents["a"]))
    assert n > len(long) + 2
    assert client.contents["a"][:n] == alone.contents["a"][:n]


@pytest.mark.usefixtures("large_tiles")
def test_the_trial_crosses_a_tile_and_a_chunk_whatever_their_sizes() -> None:
    model = planted_target()
    model.set_attn_implementation(ATTENTION)
    rows, lengths, kept = set(), set(), []
    forward = PagedModel.forward

    def noted(self, tokens, window, logits_to_keep=0):  # type: ignore[no-untyped-def]
        rows.add(tokens.numel())
        lengths.add(window.length)
        kept.append(self._cache.bytes)
        return forward(self, tokens, window, logits_to_keep)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedModel, "forward", noted)
        check_invariance(model)
        make_deterministic(model)
    assert {n > 128 for n in rows} == {n > 256 for n in lengths} == {False, True}
    assert max(rows) <= 2 * 136, "no wider passes than it needs"
    # Two rows: three do not fit in the context, and so in the least cache that is planned.
    blocks = 2 * -(-280 // 16) + 1
    assert set(kept) == {blocks * 16 * 2 * 2 * 16 * 4 * model.config.num_hidden_layers}


Spoiling = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
"""Of an attention's result, its keys and its mask: whether to spoil it."""


def beyond_a_chunk(out: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> bool:
    """Wide windows only, so that decoding one by one does not show it."""
    return key.shape[2] > 256 and out.shape[1] > 40


def of_seven(out: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> bool:
    return out.shape[1] == 7


def of_several_rows(out: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> bool:
    return out.shape[0] > 1


def of_short_rows_beside_long(out: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> bool:
    return key.shape[2] > 256 and bool((mask[0, 0, 0] == 0).sum() < 30)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize(
    ("spoiling", "name"),
    [
        (beyond_a_chunk, "the number of tokens per pass"),
        (of_seven, "the draft length"),
        (of_several_rows, "the batch"),
        (of_short_rows_beside_long, "batch mates' length"),
    ],
)
def test_what_a_trial_is_for_it_finds(spoiling: Spoiling, name: str) -> None:
    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
        out, _ = tiled_attention(module, query, key, value, attention_mask, scaling, **kwargs)
        spoilt = attention_mask is not None and spoiling(out, key, attention_mask)
        return 2 * out if spoilt else out, None

    model = planted_target(deterministic=True)
    register_attention("spoilt", attention)
    model.set_attn_implementation("spoilt")
    assert check_invariance(model) == name


@pytest.mark.usefixtures("large_tiles")
def test_what_shows_only_in_a_second_tile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted_target(deterministic=True)

    def uneven(function, tile, x):  # type: ignore[no-untyped-def]
        out = in_tiles(function, tile, x).clone()
        out.view(-1, out.shape[-1])[128:] *= 2
        return out

    monkeypatch.setattr("replicas.deterministic.in_tiles", uneven)
    assert check_invariance(model) == "the number of tokens per pass"


# ---------------------------------------------------------------------- the parts


@pytest.fixture(params=[(1, 1, 7), (3, 4, 33), (2, 5, 64), (5, 9, 100)])
def shapes(request: pytest.FixtureRequest) -> Iterator[tuple[int, int, int]]:
    """Rows, width and length: within a chunk, at its border, beyond it."""
    return request.param


def test_attention_in_tiles_is_attention(shapes: tuple[int, int, int]) -> None:
    rows, width, length = shapes
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(rows, 6, width, 8, generator=generator)
    key, value = torch.randn(2, rows, 2, length, 8, generator=generator)
    ends = torch.arange(length - width, length).repeat(rows, 1) - torch.arange(rows)[:, None]
    hidden = torch.arange(length) > ends.clamp(min=0)[..., None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
    out, _ = tiled_attention(nn.Module(), query, key, value, mask, scaling=0.3)
    repeated = [tensor.repeat_interleave(3, dim=1) for tensor in (key, value)]
    scores = (query @ repeated[0].transpose(2, 3)) * 0.3 + mask
    expected = (scores.softmax(dim=-1) @ repeated[1]).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    unmasked, _ = tiled_attention(nn.Module(), query, key, value, None)
    scores = (query @ repeated[0].transpose(2, 3)) * 8**-0.5
    torch.testing.assert_close(
        unmasked, (scores.softmax(dim=-1) @ repeated[1]).transpose(1, 2), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48, 50])
def test_tiles_cover_every_row_once(rows: int) -> None:
    seen: list[int] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return 2 * x

    x = torch.randn(2, rows, 3)
    assert torch.equal(in_tiles(double, 16, x), 2 * x)
    assert seen == [16] * -(-2 * rows // 16)


def test_a_layer_that_is_not_row_wise_is_refused() -> None:
    class Mixing(nn.Module):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return x + other

    model = copy.deepcopy(target_model("llama"))
    model.model.layers[1].mlp.mixing = Mixing()
    with pytest.raises(NotDeterministic, match=r"layers\.1\.mlp\.mixing: Mixing takes x, other"):
        make_deterministic(model)


def test_a_model_that_changes_with_its_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfTheBatch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (1 + 0.01 * (x[-1:] != 0).any())  # the last row of a tile is often padding

    model = copy.deepcopy(target_model("llama"))
    model.model.layers[0].mlp.act_fn = OfTheBatch()
    with pytest.raises(NotDeterministic, match="logits change with the number of tokens per pass"):
        make_deterministic(model)
    monkeypatch.setattr(
        "replicas.pair.make_deterministic",
        lambda model, context_len: (_ for _ in ()).throw(NotDeterministic("because")),
    )
    with pytest.raises(PairRefused, match="deterministic: because"):
        load_pair(ReplicaConfig(target=TARGET, draft=None, device="cpu", deterministic=True))


def test_an_attention_without_a_kernel_for_the_model_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_kernel(*_: object, **__: object) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    register_attention("without_kernel", no_kernel)
    monkeypatch.setitem(ATTENTIONS, "cpu", ("without_kernel", TILED))
    model = copy.deepcopy(target_model("llama"))
    make_deterministic(model, 64)
    assert model.config._attn_implementation == TILED
    monkeypatch.setitem(ATTENTIONS, "cpu", ("without_kernel",))
    with pytest.raises(RuntimeError, match="No available kernel"):
        make_deterministic(copy.deepcopy(target_model("llama")), 64)


def test_only_the_target_pays_for_it() -> None:
    pair: Pair = load_pair(
        ReplicaConfig(target=TARGET, draft="planted:tiny-draft", device="cpu", deterministic=True)
    )
    assert pair.draft is not None
    assert pair.target.config._attn_implementation == TILED
    assert pair.draft.config._attn_implementation == ATTENTION
    assert "forward" not in vars(pair.draft.lm_head)
