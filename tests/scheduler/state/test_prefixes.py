"""Proves that a sequence goes where its prefix is, within the balance of load; and that the guess
about which replica has what is bounded and errs only towards less.
"""

from __future__ import annotations

from hypothesis import given, strategies as st

from scheduler.batching.placement import PREFIX_TOKENS_PER_ROW
from scheduler.messages import Batch, BatchKind, Request
from scheduler.state.prefixes import PrefixSet, block_keys
from scheduler.state.sequence import Sequence
from tests.scheduler.hand import Hand, batches_of, rows_of

A = tuple(range(1, 241))
B = tuple(range(501, 741))
SHARING = {"prefix_sharing": True, "kv_blocks": 10_000, "context_len": 1000}


def test_keys_are_of_full_blocks_that_could_be_taken_over() -> None:
    assert len(block_keys((1,) * 9, 4, "")) == 1, "the 8th position is written anew"
    assert len(block_keys((1,) * 10, 4, "")) == 2
    assert [len(block_keys((1,) * n, 4, "")) for n in (1, 4, 5, 6)] == [0, 0, 0, 1]
    first, second = block_keys((1,) * 10, 4, "")
    assert first != second, "the same tokens behind another parent"
    assert not set(block_keys((1,) * 10, 4, "")) & set(block_keys((1,) * 10, 4, "salt"))


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 60))
def test_keys_of_what_has_grown_continue_those_before(tokens: list[int], cut: int) -> None:
    known = block_keys(tokens[:cut], 4, "x")
    assert block_keys(tokens, 4, "x", known) == block_keys(tokens, 4, "x")


def test_a_sequence_has_the_keys_of_all_its_blocks_at_any_length() -> None:
    for length in range(1, 20):
        sequence = Sequence(Request("q", A[:length], 1), 1)
        assert sequence.block_keys(4) == block_keys(A[:length], 4, sequence.salt)
        assert sequence.block_keys(3) == block_keys(A[:length], 3, sequence.salt)


@given(st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=40), max_size=30))
def test_the_set_is_bounded_and_never_claims_what_was_not_given(contents: list[list[int]]) -> None:
    most = 7
    one = PrefixSet(most)
    given_blocks: set[tuple[int, ...]] = set()
    for tokens in contents:
        keys = block_keys(tokens, 4, "")
        shared = one.shared(keys)
        assert all(tuple(tokens[: 4 * n]) in given_blocks for n in range(1, shared + 1))
        one.add(keys)
        given_blocks |= {tuple(tokens[: 4 * n]) for n in range(1, len(keys) + 1)}
        assert len(one) <= most
        assert one.shared(keys) == min(len(keys), most), "what was given last is there"


def test_no_tenant_can_choose_a_salt_that_makes_it_another() -> None:
    pairs = [
        ("", ""),
        ("", "a"),
        ("a", ""),
        ("a", "a"),
        ("aa", ""),
        ("a ", "a"),
        ("a", " a"),
        ("1", ""),
    ]
    salts = [
        Sequence(Request("q", (1,), 1, tenant=tenant, cache_salt=salt), 1).salt
        for tenant, salt in pairs
    ]
    assert len(set(salts)) == len(pairs)


def two_replicas(**config: object) -> Hand:
    """`a` runs on r1 with the prefix A, `b` on r2 with B."""
    hand = Hand(steps_per_batch_max=1, **config)
    hand.join("r1", **SHARING)
    (batch,) = batches_of(hand.submit("a", prompt=A))
    assert batch.replica_id == "r1"
    hand.done(batch)
    hand.join("r2", **SHARING)
    (batch,) = batches_of(hand.submit("b", prompt=B))
    assert batch.replica_id == "r2"
    hand.done(batch)
    return hand


def prefill_of(hand: Hand, name: str) -> Batch:
    batches = [
        o for o in hand.batches.values() if o.kind is BatchKind.PREFILL and name in rows_of(o)
    ]
    return batches[-1]


def test_a_prompt_goes_where_its_prefix_is() -> None:
    hand = two_replicas()
    hand.submit("a2", prompt=(*A, 5))
    assert prefill_of(hand, "a2").replica_id == "r1"
    hand.submit("b2", prompt=(*B, 5))
    assert prefill_of(hand, "b2").replica_id == "r2"


def test_it_is_found_after_its_sequence_has_finished_with_what_was_generated() -> None:
    hand = two_replicas()
    batch = hand.in_flight("r1")[0]
    new = tuple(range(800, 900))
    hand.done(batch, a=new)
    assert "a" in hand.finishes
    keys = block_keys((*A, *new), 4, "0  ")
    assert hand.replica("r1").prefixes.shared(keys) == len(keys)
    hand.submit("next", prompt=(*A, *new, 1, 2))
    assert prefill_of(hand, "next").replica_id == "r1"


def test_neither_another_tenant_nor_another_salt_shares() -> None:
    for fields in ({"tenant": "x"}, {"cache_salt": "x"}):
        hand = two_replicas()
        hand.submit("filler", prompt=(9,) * 250)
        on = prefill_of(hand, "filler").replica_id
        same = A if on == "r1" else B
        hand.submit("other", prompt=(*same, 5), **fields)
        assert prefill_of(hand, "other").replica_id != on, "the lighter one, wherever the prefix is"
        assert prefill_of(hand, "other").prefill[0].salt != prefill_of(hand, "a").prefill[0].salt


def test_load_goes_before_a_prefix_that_is_worth_less() -> None:
    """240 tokens are worth three residents more, not four."""
    assert 236 // PREFIX_TOKENS_PER_ROW == 3
    hand = two_replicas(batches_in_flight_max=8)
    for number in range(4):
        hand.submit(f"q{number}", prompt=(*A[:-1], number))
    homes = [prefill_of(hand, f"q{i}").replica_id for i in range(4)]
    assert homes == ["r1", "r1", "r1", "r2"]
