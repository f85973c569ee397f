"""Proves that layers with a window keep all that a later query sees, and no more than is counted.

Random lives of sequences are held against a text-book model of what lies in each block; the counts
are those that a scheduler goes by (`ReplicaSpec.blocks_taken`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from replicas.kv_cache import (
    SCRAP_BLOCK,
    BlockAllocator,
    BlockGroup,
    CacheShape,
    Chain,
    LayerShape,
    PagedCache,
    blocks_of_a_pass,
    counted,
    divided_into_groups,
    first_table,
    one_group,
    uniform,
)
from replicas.kv_cache.device_layout import device_ranges
from replicas.kv_cache.groups import AHEAD
from scheduler.config import DRAFT_LEN_MAX
from scheduler.messages import blocks_taken

BLOCK = 4
CPU = torch.device("cpu")
PASS = 40
"""Tokens of a prefill pass."""
GROUPS = (BlockGroup((0,)), BlockGroup((1,), window=10), BlockGroup((2,), chunk=12))
COUNTED = counted(GROUPS, BLOCK)
USABLE = 240
BLOCKS = USABLE + blocks_of_a_pass(GROUPS, BLOCK, PASS)
CONTENTS = [[1] * 150, [1] * 60 + [2] * 90, [1] * 33 + [3] * 40, [2] * 120, [1] * 20, [4] * 3]


def layers(*windows: int | None, **changes: int) -> list[LayerShape]:
    """One with each window, or with none."""
    made = uniform(len(windows), 4, 2, 8)
    return [
        replace(layer, window=window, **changes)
        for layer, window in zip(made, windows, strict=True)
    ]


def first_seen(group: BlockGroup, position: int) -> int:
    """The first position that a query there sees: by the definition."""
    if group.window is not None:
        return max(position - group.window + 1, 0)
    return position - position % group.chunk if group.chunk is not None else 0


class Lives:
    """Sequences over one allocator, as a replica treats them, and what was written where."""

    def __init__(self) -> None:
        self.blocks = BlockAllocator(BLOCKS, BLOCK, GROUPS)
        self.content: dict[str, list[int]] = {}
        self.valid: dict[str, int] = {}
        self.written: dict[tuple[int, int], list[int]] = {}
        """By block and position in it: the tokens up to what was written there."""

    def key(self, name: str, blocks: int) -> list[bytes]:
        return Chain((), "", BLOCK).keys(self.content[name], blocks)

    def room(self, name: str) -> int:
        return -(-(len(self.content[name]) + AHEAD) // BLOCK)

    def reserved(self) -> int:
        return sum(blocks_taken(COUNTED, self.room(name)) for name in self.content)

    def begin(self, name: str, content: list[int]) -> None:
        self.content[name] = list(content)
        if self.reserved() > USABLE:
            del self.content[name]
            return
        full = max(len(content) - 2, 0) // BLOCK
        self.valid[name] = self.blocks.adopt(name, self.key(name, full)) * BLOCK
        self.blocks.grow(name, self.room(name) * BLOCK)
        self.check(name)

    def write(self, name: str, begin: int, end: int) -> None:
        """A pass over these positions; queries of the others see what they shall."""
        self.blocks.reach(name, end)
        tables = self.blocks.table([name], CPU)[0]
        for group in range(len(GROUPS)):
            for position in range(begin, end):
                block = int(tables[group, position // BLOCK])
                assert block != SCRAP_BLOCK
                tokens = [*self.content[name], *[0] * AHEAD][: position + 1]
                self.written[block, position % BLOCK] = tokens
        for position in range(begin, end):
            self.sees(name, position)

    def sees(self, name: str, query: int) -> None:
        tables = self.blocks.table([name], CPU)[0]
        for number, group in enumerate(GROUPS):
            for position in range(first_seen(group, query), min(query, self.valid[name])):
                block = int(tables[number, position // BLOCK])
                own = self.content[name][: position + 1]
                assert self.written[block, position % BLOCK] == own, (name, number, position)

    def fill(self, name: str, tokens: int) -> None:
        begin, end = self.valid[name], min(self.valid[name] + tokens, len(self.content[name]) - 1)
        if begin < end:
            self.write(name, begin, end)
            self.valid[name] = end
        self.settle(name, publish=True)

    def step(self, name: str, drafts: int, kept: int) -> None:
        """Writes drafts behind the content, of which some are right."""
        content = self.content[name]
        if self.valid[name] < len(content) - 1:
            return
        longest = self.room(name) * BLOCK - len(content)
        drafts = min(drafts, AHEAD - 1, longest - 1)
        if drafts < 0:
            return
        start = len(content) - 1
        self.write(name, start, start + drafts + 1)
        self.check(name)
        room = self.room(name)
        for token in range(min(kept, drafts) + 1):
            content.append(7 + token % 3)
        if self.room(name) > room and self.reserved() > USABLE:
            del content[start + 1 :]
            return
        self.blocks.grow(name, self.room(name) * BLOCK)
        for position in range(start, len(content) - 1):  # what was right is valid
            for group, table in enumerate(self.blocks.table([name], CPU)[0]):
                block = int(table[position // BLOCK])
                assert block != SCRAP_BLOCK, group
                self.written[block, position % BLOCK] = content[: position + 1]
        self.valid[name] = len(content) - 1
        self.settle(name)

    def settle(self, name: str, publish: bool = False) -> None:
        settled = min(max(len(self.content[name]) - 2, 0), self.valid[name])
        if publish:
            self.blocks.publish(name, self.key(name, settled // BLOCK))
        self.blocks.slide(name, settled)
        self.check(name)
        self.sees(name, self.valid[name])

    def check(self, name: str) -> None:
        """Between passes, and in a batch of steps, it has no more blocks than are counted."""
        self.blocks.check_integrity()
        held = int((self.blocks.table([name], CPU)[0] != SCRAP_BLOCK).sum())
        assert held <= blocks_taken(COUNTED, self.room(name))
        assert self.blocks.free_blocks >= BLOCKS - self.reserved()

    def end(self, name: str) -> None:
        if name in self.content:
            settled = min(max(len(self.content[name]) - 2, 0), self.valid[name])
            self.blocks.publish(name, self.key(name, settled // BLOCK))
            del self.content[name], self.valid[name]
        self.blocks.release(name)
        self.blocks.check_integrity()


moves = st.lists(
    st.tuples(
        st.sampled_from("abcd"), st.integers(0, 9), st.integers(0, AHEAD), st.integers(0, AHEAD)
    ),
    max_size=40,
)


@given(moves)
def test_a_later_query_finds_what_it_sees_and_no_sequence_has_more_than_is_counted(
    moves: list[tuple[str, int, int, int]],
) -> None:
    """A move ends a life, begins one, fills, or steps with drafts of which some are kept."""
    lives = Lives()
    for name, which, size, kept in moves:
        if which == 0:
            lives.end(name)
        elif name not in lives.content:
            lives.begin(name, CONTENTS[which % len(CONTENTS)])
        elif lives.valid[name] < len(lives.content[name]) - 1:
            lives.fill(name, min(size, PASS))
        else:
            lives.step(name, size, kept)


@pytest.mark.parametrize("window", range(1, 12))
def test_some_length_takes_all_blocks_that_are_counted_for_a_window(window: int) -> None:
    group = BlockGroup((0,), window=window)
    blocks = BlockAllocator(100, BLOCK, (group,))
    held = []
    for length in range(2, 40):
        blocks.reach("a", length - 1)
        blocks.slide("a", length - 2)
        blocks.reach("a", length - 1 + AHEAD)
        held.append(100 - blocks.free_blocks)
    assert max(held) == group.blocks_most(BLOCK)


def filled(blocks: BlockAllocator, name: str, tokens: list[int]) -> int:
    """In passes of 8; returns the blocks of tokens that were found."""
    keys = Chain((), "", BLOCK).keys(tokens, len(tokens) // BLOCK)
    found = blocks.adopt(name, keys)
    blocks.grow(name, len(tokens))
    for end in range(found * BLOCK + 8, len(tokens) + 1, 8):
        blocks.reach(name, end)
        blocks.publish(name, keys[: end // BLOCK])
        blocks.slide(name, end)
    return found


def test_a_prefix_is_found_as_far_as_its_last_window_is_there() -> None:
    """What a longer text has given up is found while nothing else takes its place."""
    windows = (BlockGroup((0,)), BlockGroup((1,), window=9))
    blocks = BlockAllocator(60, BLOCK, windows)
    filled(blocks, "a", [1] * 80)
    assert filled(blocks, "b", [1] * 40 + [2] * 40) == 10, "with blocks that nobody has any more"
    for name in "ab":
        blocks.release(name)
    filled(blocks, "other", [3] * 64)
    keys = Chain((), "", BLOCK).keys([1] * 80, 20)
    assert blocks.found(keys[:10]) < 10, "its window has gone"
    blocks.check_integrity()


def test_without_windows_there_is_one_table_and_blocks_are_counted_as_they_are() -> None:
    plain = layers(*[None] * 4)
    assert divided_into_groups(plain, 16, 8192) == one_group(plain)
    assert counted(one_group(plain), 16) == ()
    assert blocks_taken((), 500) == 500


def gemma(times: int) -> list[LayerShape]:
    return layers(*([1024] * 5 + [None]) * times)


@pytest.mark.parametrize("times", [1, 4, 8])
def test_8000_tokens_in_the_shape_of_gemma_3_take_less_than_a_third(times: int) -> None:
    """5 of 6 layers have a window of 1,024."""
    shape = gemma(times)
    groups = divided_into_groups(shape, 16, 8000)
    assert len(groups) == 6
    assert sorted(store for group in groups for store in group.stores) == [*range(6 * times)]
    taken = blocks_taken(counted(groups, 16), 500) * len(groups[0].stores)
    assert taken / (500 * len(shape)) == pytest.approx(0.282, abs=0.001)


def test_groups_are_made_where_they_save_and_blocks_have_one_size() -> None:
    half = layers(*[1024, None] * 6)
    assert [len(group.stores) for group in divided_into_groups(half, 16, 32768)] == [6, 6]
    assert divided_into_groups(half, 16, 1024) == one_group(half), "no text is longer"
    uneven = [*half[:-1], replace(half[-1], kv_heads=4)]
    assert divided_into_groups(uneven, 16, 32768) == one_group(uneven)
    many = layers(*[1024] * 25, None)
    assert len(divided_into_groups(many, 16, 32768)) <= 8, "each table costs time in every pass"


def test_what_reads_another_layers_keys_and_values_keeps_them() -> None:
    own = layers(8, None)
    reader = replace(own[0], window=None)
    shared = [*own, replace(reader, store=0)]
    assert divided_into_groups(shared, 4, 4096) == one_group(shared)


def test_a_drafters_layers_lie_beside_a_table_that_keeps_all() -> None:
    """A model of windows alone keeps none of its own whole."""
    windows = layers(*[16] * 12)
    (alone,) = divided_into_groups(windows, 4, 4096)
    assert alone.window == 16
    first, *others = divided_into_groups(windows, 4, 4096, beside=windows[0].kv_numbers)
    assert first.keeps_all
    assert first.stores == ()
    assert {group.window for group in others} == {16}
    assert sorted(store for group in others for store in group.stores) == [*range(12)]


@pytest.mark.parametrize(("layers_beside", "tables"), [(0, 6), (10, 5), (40, 3), (100, 1)])
def test_the_more_lies_beside_in_each_block_the_fewer_tables_save(
    layers_beside: int, tables: int
) -> None:
    shape = gemma(4)
    beside = layers_beside * shape[0].kv_numbers
    assert len(divided_into_groups(shape, 16, 8000, beside)) == tables


def test_a_batch_of_steps_ends_where_a_window_has_no_room_for_another_step() -> None:
    assert AHEAD > DRAFT_LEN_MAX, "for one step there is always room"
    plain, sliding = BlockAllocator(9, BLOCK), BlockAllocator(9, BLOCK, GROUPS)
    assert plain.steps_most(1000, 7) == 1000
    for draft_len in (0, 1, 6, 7):
        most = sliding.steps_most(1000, draft_len)
        assert most * (draft_len + 1) <= AHEAD < (most + 1) * (draft_len + 1)
        assert sliding.steps_most(2, draft_len) == 2


def test_layers_of_each_group_lie_in_blocks_of_their_own_table() -> None:
    """Two tables and two layers in each; a drafter's layers read the first table."""
    needs = layers(None, 10, 10, None)
    groups = (BlockGroup((0, 3)), BlockGroup((1, 2), window=10))
    blocks = BlockAllocator(12, BLOCK, groups)
    for name in "ab":
        blocks.grow(name, 6)
        blocks.reach(name, 6)
    tables = blocks.table("ab", CPU)
    assert tables.shape == (2, 2, 2)
    assert torch.equal(first_table(tables), tables[:, 0])
    assert torch.equal(first_table(tables[:, 1]), tables[:, 1])
    shape = CacheShape.of(BLOCK, 64, needs)
    cache = PagedCache(shape, needs, 12, torch.float32, CPU, groups=groups)
    layout = device_ranges(tables, [(0, 6), (2, 6)], shape)
    fresh = torch.randn(4, 10, 2, 2, 8, generator=torch.Generator().manual_seed(1))
    for layer in range(4):
        cache.write(layer, layout.slots, fresh[layer])
    for layer, group in enumerate((0, 1, 1, 0)):
        assert cache.group_of(layer) == group
        assert torch.equal(cache.own(layer, layout.tables), tables[:, group])
        whole = cache.layers[layer][tables[:, group]].flatten(1, 2)
        assert torch.equal(torch.cat((whole[0, :6], whole[1, 2:6])), fresh[layer])


def test_rows_of_a_trial_have_blocks_of_their_own_in_every_group() -> None:
    needs = layers(None, 10, 12)
    cache = PagedCache(
        CacheShape.of(BLOCK, 64, needs), needs, 11, torch.float32, CPU, groups=GROUPS
    )
    assert cache.rooms == 3
    own = torch.tensor([[1, 2], [3, 3]])
    tables = cache.trial_table(own)
    assert tables.shape == (2, 3, 2)
    blocks = {
        (group, int(own[row, at])): int(tables[row, group, at])
        for row in range(2)
        for group in range(3)
        for at in range(2)
    }
    assert sorted(blocks.values()) == [*range(1, 10)]
    assert cache.layers[0].shape[0] == 12
    one = PagedCache(CacheShape.of(BLOCK, 64, needs), needs, 11, torch.float32, CPU)
    assert one.trial_table(own) is own
    assert one.rooms == 11
