"""Proves that blocks are shared by equal content alone, never lost, and never written while shared.

The first part is about the allocator, with random operations; the second about a replica, whose
output is compared with transformers' `generate` and whose KV tensors are watched.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from replicas.kv_cache import BlockAllocator, Chain, OutOfBlocks
from replicas.replica import PREFIX_GAIN_TOKENS
from replicas.residents import Residents
from scheduler.messages import PrefillRow, Sampling
from tests.reference import plain_greedy
from tests.replicas.pool import Client, failing_pass
from tests.tiny_pairs import DEVICE, target_model, tiny_replica, unrecorded

BLOCK = 4
IDENTITY = ("target", "draft", "float32", BLOCK)


def keys_of(
    tokens: list[int], identity: tuple[object, ...] = IDENTITY, salt: str = ""
) -> list[bytes]:
    return Chain(identity, salt, BLOCK).keys(tokens, len(tokens) // BLOCK)


# ------------------------------------------------------------------------------ keys


def test_other_models_dtypes_block_sizes_and_salts_have_other_keys() -> None:
    identities = [IDENTITY, ("target draft", "", "float32", BLOCK)]
    for index, other in enumerate(("other", "", "bfloat16", 2 * BLOCK)):
        identities.append((*IDENTITY[:index], other, *IDENTITY[index + 1 :]))
    tokens = list(range(12))
    found = [keys_of(tokens, *identity) for identity in product(identities, ("", "mine", " "))]
    assert len({key for keys in found for key in keys}) == len(found) * 3


def test_a_key_is_of_all_tokens_before_it_and_they_do_not_run_into_each_other() -> None:
    """As text or in few bytes [1, 23] and [12, 3] could be one."""
    contents = [[1, 23, 4, 5], [12, 3, 4, 5], [1, 2, 345, 0], [256, 0, 0, 0], [0, 1, 0, 0]]
    longer = [[*first, *second] for first in contents for second in contents]
    assert len({key for content in longer for key in keys_of(content)}) == 5 + 5 * 5
    assert [keys_of(content)[0] for content in longer[::5]] == [
        keys_of(content)[0] for content in contents
    ]


def test_a_chain_that_grows_gives_the_keys_of_one_that_came_whole() -> None:
    tokens = [7, 5, 3] * 10
    chain = Chain(IDENTITY, "", BLOCK)
    assert [chain.keys(tokens[: 4 * n], n) for n in range(8)][-1] == keys_of(tokens)
    assert chain.keys(tokens, 2) == keys_of(tokens)[:2]


# ------------------------------------------------------------------------------ blocks

CONTENTS = [[1] * 24, [1] * 8 + [2] * 16, [1] * 8 + [2] * 4 + [3] * 12, [2] * 24, [1] * 13, [4] * 3]


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 7)), max_size=120))
def test_random_lives_keep_every_block_and_share_only_equal_content(
    moves: list[tuple[str, int]],
) -> None:
    """0 and 7 end a life; others begin one with that content, or publish what it has."""
    blocks = BlockAllocator(blocks=14, block_size=BLOCK)
    lives: dict[str, list[int]] = {}
    written: dict[int, list[int]] = {}
    for name, which in moves:
        if which in (0, 7):
            blocks.release(name)
            lives.pop(name, None)
        elif name in lives:
            content = lives[name]
            blocks.publish(name, keys_of(content)[: max(len(content) - 2, 0) // BLOCK])
        else:
            content = CONTENTS[which - 1]
            found = blocks.adopt(name, keys_of(content)[: max(len(content) - 2, 0) // BLOCK])
            try:
                blocks.grow(name, len(content))
            except OutOfBlocks:
                blocks.release(name)
                blocks.check_integrity()
                continue
            lives[name] = content
            table = blocks.table([name], torch.device("cpu"))[0].tolist()
            for index, block in enumerate(table):
                own = content[: (index + 1) * BLOCK]
                if index < found:
                    assert written[block] == own, "a wrong hit"
                else:
                    written[block] = own
        blocks.check_integrity()
        # The pool counts as if nothing were shared; what is left is never less than that.
        reserved = sum(-(-len(content) // BLOCK) for content in lives.values())
        assert blocks.free_blocks >= 14 - reserved


def fill(blocks: BlockAllocator, name: str, tokens: list[int]) -> int:
    found = blocks.adopt(name, keys_of(tokens))
    blocks.grow(name, len(tokens))
    blocks.publish(name, keys_of(tokens))
    blocks.check_integrity()
    return found


def test_the_least_recently_used_goes_first_and_the_tail_of_a_chain_before_its_head() -> None:
    blocks = BlockAllocator(blocks=6, block_size=BLOCK)
    for name, token in (("a", 1), ("b", 2)):
        fill(blocks, name, [token] * 12)
        blocks.release(name)
    assert blocks.adopt("a2", keys_of([1] * 4)) == 1
    blocks.release("a2")
    fill(blocks, "new", [3] * 8)
    assert blocks.adopt("a3", keys_of([1] * 12)) == 1, "its head was used last"
    blocks.release("a3")
    assert blocks.adopt("b3", keys_of([2] * 12)) == 3, "the oldest two were the tail of a"


def test_who_shares_with_another_of_the_same_batch_comes_second_if_it_pays() -> None:
    blocks = BlockAllocator(blocks=64, block_size=BLOCK)
    residents = Residents(blocks, None, IDENTITY, sharing=True)
    system, other = (1,) * 12, (2,) * 12
    contents = [(*system, *(n,) * 6) for n in range(5, 9)] + [(*other, *(9,) * 6)]

    def second(fills: tuple[int, ...], least: int) -> str:
        """Of rows a, b, ..., which fill so many blocks."""
        rows = [
            PrefillRow(name, content, 1, Sampling(), (), 5, until=fill * BLOCK)
            for name, content, fill in zip("abcde", contents, fills, strict=True)
        ]
        waves = residents.waves(rows, least * BLOCK)
        return "".join(row.sequence_id for wave in waves[1:] for row in wave)

    assert second((4, 4, 4, 4, 4), 8) == "bcd", "nine blocks"
    assert second((4, 4, 4, 4, 4), 9) == ""
    assert second((1, 4, 4, 4, 4), 0) == "bcd", "what the first one fills"
    assert second((4, 1, 1, 1, 4), 3) == "", "no more than they are to fill"
    fill(blocks, "a", list(system))
    assert second((4, 4, 4, 4, 4), 0) == "", "it is there already"


# ------------------------------------------------------------------------------ replica


class Chats(Client):
    """Runs whole requests on one replica."""

    def run(self, name: str, tokens: list[int], new: int, k: int = 3, salt: str = "") -> int:
        """Runs it to its end and checks it; returns the positions that were found."""
        found = self.prefill(new, salt, **{name: tokens}).rows[0].reused
        while len(self.new_tokens(name)) < new:
            self.steps(k, names=[name])
        assert self.new_tokens(name) == plain_greedy(target_model("llama"), tokens, new)
        return found


@pytest.fixture
def chats() -> Chats:
    return Chats(tiny_replica("llama", block_size=BLOCK))


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]


def test_a_second_request_finds_the_prefix_of_the_first_and_says_the_same(chats: Chats) -> None:
    assert chats.run("a", PROMPT, 10) == 0
    assert chats.run("b", PROMPT, 10) == 16, "not beyond: the 20th position is written anew"
    chats.replica.release(["a", "b"])
    assert chats.run("c", [*PROMPT[:13], 1, 2], 10) == 12
    assert chats.run("d", [*PROMPT, 1], 10) == 20, "of what a generated nothing, but its prompt"


def test_what_the_draft_has_not_seen_is_not_shared(chats: Chats) -> None:
    """Without draft tokens the draft lags behind, so it has no KV for what was generated."""
    chats.run("a", PROMPT, 20, k=0)
    chats.replica.release(["a"])
    assert chats.run("b", [*chats.contents["a"], 7, 7, 7], 10) == 20


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_the_last_tokens_are_always_computed(chats: Chats, length: int) -> None:
    chats.run("a", PROMPT[:length], 6)
    chats.replica.release(["a"])
    assert chats.run("b", PROMPT[:length], 6) == max(length - 2, 0) // BLOCK * BLOCK


def test_another_salt_finds_nothing(chats: Chats) -> None:
    chats.run("a", PROMPT, 10, salt="x")
    assert chats.run("b", PROMPT, 10, salt="y") == 0
    assert chats.run("c", PROMPT, 10) == 0
    assert chats.run("d", PROMPT, 10, salt="x") == 16


def test_without_sharing_nothing_is_found_and_the_spec_says_so() -> None:
    chats = Chats(tiny_replica("llama", block_size=BLOCK, prefix_sharing=False))
    assert not chats.replica.spec.prefix_sharing
    chats.run("a", PROMPT, 10)
    assert chats.run("b", PROMPT, 10) == 0


def test_a_found_prefix_goes_beyond_the_chunk_that_was_asked_for(chats: Chats) -> None:
    chats.run("a", PROMPT, 4)
    chats.contents["b"] = PROMPT
    assert chats.prefill_until(4, b=3).rows[0].reused == 16
    chats.filled["b"] = 16
    assert chats.prefill_until(4, b=20).rows


def test_prompts_of_one_batch_share_what_the_first_of_them_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A GPU computes so short a prefix again, rather than run a second pass.
    monkeypatch.setitem(PREFIX_GAIN_TOKENS, "cuda", PREFIX_GAIN_TOKENS["cpu"])
    client = Client(tiny_replica("llama", block_size=BLOCK))
    system = PROMPT * 3
    prompts = {f"{n}": [*system, n, n + 1, n] for n in range(4)}
    prompts["alone"] = [7, *PROMPT]
    result = client.prefill(20, **prompts)
    assert [row.sequence_id for row in result.rows] == list(prompts), "in the batch's order"
    assert [row.reused for row in result.rows] == [0, 60, 60, 60, 0]
    for _ in range(4):
        client.steps(3, names=sorted(prompts, key=lambda name: len(client.contents[name])))
    client.check()


def test_a_failed_prefill_leaves_what_is_shared_as_it_was(chats: Chats) -> None:
    chats.run("a", PROMPT, 10)
    with pytest.raises(RuntimeError), failing_pass(chats.replica, 1):
        chats.prefill(10, b=[*PROMPT, *PROMPT])
    chats.replica.check_integrity()
    assert chats.replica.residents == ("a",)
    assert chats.run("c", [*PROMPT, *PROMPT], 10) == 16, "what a prefilled, and nothing of b"


def test_shared_blocks_are_never_written(chats: Chats) -> None:
    chats.run("a", PROMPT, 10)
    replica = chats.replica
    caches = [unrecorded(model).cache for model in (replica.target, replica.drafter.model)]
    table = replica.blocks.table(["a"], torch.device(DEVICE))[0, :4]
    before = [[layer[table].clone() for layer in cache.layers] for cache in caches]
    for k in (0, 1, 4):
        assert chats.run(f"b{k}", PROMPT, 12, k=k) == 16
        assert chats.run(f"c{k}", [*PROMPT[:17], 1], 12, k=k) == 16
        replica.release([f"b{k}", f"c{k}"])
    for cache, layers in zip(caches, before, strict=True):
        for layer, kept in zip(cache.layers, layers, strict=True):
            assert torch.equal(layer[table], kept)
