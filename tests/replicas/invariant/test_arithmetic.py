"""Proves that a row's logits have the same bits whatever is computed beside it (float32, CPU).

Batch, width, padding and neighbours change nothing, nor does it matter whether a token came by
prefill or by verification. Bits are compared, never distances.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear

from replicas.invariant import proof
from replicas.invariant.ops import TILE, Arithmetic, can_prepack
from replicas.models.own_code.layer_reading import computing_by
from replicas.models.paged_model import ForwardOptions
from tests.replicas.built import Rows, built, uneven_model, with_massive_activations
from tests.tiny_pairs import ARCHITECTURES, target_model

CPU = torch.device("cpu")
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 31, 40, 64, 65, 90, 127, 150, 191, 192, 193, 200, 230, 250)
needs_onednn = pytest.mark.skipif(
    not can_prepack(CPU, torch.float32), reason="this torch has no oneDNN"
)


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "qwen2"])
def test_a_rows_logits_have_the_same_bits_in_every_pass(architecture: str, join: bool) -> None:
    model, how = built(uneven_model(architecture), join)
    assert model.arithmetic.proven, how
    assert (model.decoder is not None) == join, how
    rows, rng, computed = Rows(model, LENGTHS), random.Random(1), 0
    while computed < 6000:
        count, differing = rows.random_pass(rng)
        computed += count
        assert differing == 0


@pytest.mark.parametrize("join", [True, False])
def test_so_they_do_with_massive_activations(join: bool) -> None:
    """Sums over numbers of very different size show every other order of adding."""
    model, how = built(with_massive_activations(uneven_model("llama")), join)
    rows, rng = Rows(model, LENGTHS), random.Random(2)
    assert (model.decoder is not None) == join, how
    assert sum(rows.random_pass(rng)[1] for _ in range(60)) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_they_do_not_depend_on_what_was_computed_before(threads: int) -> None:
    """A lost replica's rows are filled again, elsewhere and in other passes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model, _ = built(uneven_model("qwen3"))
        rows = Rows(model, LENGTHS)
        for row in range(len(LENGTHS)):
            model.cache.clear()
            alone = Rows.__new__(Rows)
            alone.model, alone.lengths = model, (LENGTHS[row],)
            alone.table, alone.tokens = rows.table[-1:], rows.tokens[row : row + 1]
            assert torch.equal(alone.prefilled()[0], rows.logits[row])
    finally:
        torch.set_num_threads(before)


def test_what_is_tapped_has_the_same_bits_as_well() -> None:
    """A drafter's head sees hidden states of prefills and of checks; transformers numbers them."""
    own = target_model("llama")
    model, _ = built(uneven_model("llama"))
    rows = Rows(model, (90,))
    options = ForwardOptions(logits=False, aux_layers=(0, 1, 2))
    with torch.inference_mode():
        whole = model.backend.ranges_layout(rows.table, [(0, 90)])
        aux_hidden_states = model.forward(rows.tokens[0, :90], whole, options).aux_hidden_states
        layout = model.backend.step_layout(rows.table, [80], 5).window(0, 5)
        again = model.forward(rows.tokens[0, 80:85], layout, options).aux_hidden_states
        with computing_by(model.model, "eager", "eager"):
            states = model.model(rows.tokens[:1, :90], output_hidden_states=True, use_cache=False)
    assert own.config.num_hidden_layers == 3
    for states_, other, expected in zip(
        aux_hidden_states, again, states.hidden_states, strict=False
    ):
        assert torch.equal(states_[80:85], other)
        assert torch.allclose(states_, expected[0], atol=1e-4)


@pytest.mark.parametrize("dim", [32, 128])
def test_attention_is_proven_for_heads_of_usual_sizes(dim: int) -> None:
    """Also where 1 / sqrt(dim) is no power of two, and so where it is multiplied by shows."""
    assert proof.prove([], [(dim, None, False)], [], prepack=True).proven


@pytest.mark.long
@needs_onednn
@pytest.mark.skipif(torch.__version__ < "2.13", reason="its libraries give none")
def test_an_older_processor_has_a_proof_as_well() -> None:
    """Without AVX-512 Intel's library chooses kernels by the number of queries and by threads."""
    code = (
        "import torch; from replicas.invariant.proof import prove; torch.set_num_threads(2);"
        "assert prove([(96, 48), (576, 320)], [(80, None, False)], [], prepack=True).proven"
    )
    older = dict.fromkeys(("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"), "AVX2")
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **older, "ATEN_CPU_CAPABILITY": "avx2"},
        check=True,
        timeout=120,
    )


def test_passes_are_padded_to_numbers_of_tokens_that_are_proven() -> None:
    arithmetic = Arithmetic(tokens=(4, 8, 12, 64), proven=True)
    sizes = {count: arithmetic.padded(count) for count in (1, 4, 5, 13, 64, 65, 130)}
    assert sizes == {1: 4, 4: 4, 5: 8, 13: 64, 64: 64, 65: 68, 130: 132}
    assert Arithmetic().padded(5) == 5, "without sizes nothing is padded"


@pytest.mark.parametrize(
    ("bad", "fan_out"), [({1, 5, 80}, 321), (set(range(1, 65)), 322)], ids=["some", "all"]
)
def test_a_library_whose_bits_follow_the_number_of_tokens_is_found_out(
    bad: set[int], fan_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes are padded to other numbers then, to full tiles if need be. No other test proves
    products of these shapes, and a proof is kept for the process."""

    def shaken(x: torch.Tensor, *of_layer: torch.Tensor) -> torch.Tensor:
        noise = 1e-6 * x.shape[0] if x.shape[0] in bad else 0.0
        return linear(x, *of_layer) + noise

    monkeypatch.setattr("replicas.invariant.ops.linear", shaken)
    arithmetic = proof.prove([(576, fan_out)], [(16, None, False)], [], prepack=False)
    assert arithmetic.proven
    assert not (bad - {TILE}) & set(arithmetic.tokens)
    assert arithmetic.padded(5) == next(size for size in arithmetic.tokens if size >= 5) > 5
