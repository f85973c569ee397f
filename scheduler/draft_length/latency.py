"""The latency table of one replica: what its steps and prefills take, learned from its results.

A table has the mean seconds of three kinds of work, by bucket of (tokens, KV positions): one draft
pass, the rest of a step (verification and all else), and one prefill batch. A prefill batch reads,
for each of its tokens, all positions filled before it. One factor for the machine's speed today
multiplies all of them: most of a timing change is attributed to it, so work that is seen seldom is
rescaled together with work that is seen often.

Knows numbers, nothing of sequences, batches or what the times are used for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from operator import mul

CELLS_MAX = 128
"""Buckets of one kind of work; the one seen longest ago goes first."""
CELL_RATE = 0.03
"""Weight of a new time in the mean of its bucket, once the bucket has seen 1 / CELL_RATE."""
SPEED_RATE = 0.1
"""Weight of a step's time in the factor for the machine's speed."""
OUTLIER = 1.5
"""A time counts at most so many times what was expected. One slow step moves little; a lasting
change is still followed within some tens of steps."""
STALE = 256
"""A bucket that was not seen for so many steps may be tried again."""
COUNT_MAX = 4
"""Times of a bucket that count where several of the same tokens are put together."""
FIT_EVERY = 16
"""Times seen after which a kind is interpolated anew; sooner if one tells something new."""


def bucket(tokens: int) -> int:
    """The bucket of so many tokens, 1 at least: exact up to 16, then eight per octave.

    Hardware computes whole tiles of tokens. Each end of a tile (16, 32, 40, 48, ...) is the end of
    a bucket, so a table shows the steps in which times rise.
    """
    below = tokens - 1
    octave = max(below.bit_length() - 4, 0)
    return 8 * octave + (below >> octave)


@dataclass(slots=True)
class _Cell:
    """Means of like work. `seconds` are those at the machine's usual speed."""

    tokens: float
    kv: float
    seconds: float
    count: int
    """Times that the means stand for. The first run of a kind is often slow, code is made for it or
    memory is fetched: it is forgotten at the second."""
    last: int
    """The step that saw it last."""


class Latencies:
    """Seconds of one kind of work at the machine's usual speed.

    Between buckets they are interpolated in tokens; within the same tokens each KV position costs
    `kv_s` more, which is fitted to all buckets together.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._tokens: list[float] = []
        self._seconds: list[float] = []
        """By tokens, rising: seconds of work that reads no KV."""
        self._last: dict[int, int] = {}
        """The step that saw a bucket of tokens last."""
        self._rise_s = 0.0
        """Seconds per token beyond the fewest and the most tokens that were seen."""
        self._unfitted = FIT_EVERY
        """Times seen since the last interpolation; the first one is due at once."""
        self.kv_s = 0.0

    def __len__(self) -> int:
        """Numbers of tokens that are told apart; none before anything was seen."""
        return len(self._tokens)

    def __call__(self, tokens: float, kv: float) -> float:
        """Expected seconds; 0 while nothing was seen."""
        known, seconds = self._tokens, self._seconds
        at = bisect_left(known, tokens)
        if 0 < at < len(known):
            share = (tokens - known[at - 1]) / (known[at] - known[at - 1])
            base_s = seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
        elif known:
            end = 0 if at == 0 else -1
            # Fewer tokens take at least their share: no work takes no time.
            least_s = seconds[end] * min(tokens / known[end], 1.0)
            base_s = max(seconds[end] + self._rise_s * (tokens - known[end]), least_s)
        else:
            base_s = 0.0
        return base_s + self.kv_s * kv

    def stale(self, tokens: int, now: int) -> bool:
        """Whether such work was not seen for STALE steps, or never."""
        last = self._last.get(bucket(tokens))
        return last is None or now - last >= STALE

    def usual_s(self, tokens: int, kv: float) -> float | None:
        """The mean of its bucket, above 0; None where that is not known yet."""
        cell = self._cells.get((bucket(tokens), int(kv).bit_length()))
        if cell is None:
            return None
        return max(cell.seconds + self.kv_s * (kv - cell.kv), 0.5 * cell.seconds)

    def observe(self, tokens: int, kv: float, seconds: float, now: int) -> None:
        """Work took `seconds` at the usual speed, in step number `now`."""
        at = bucket(tokens)
        new = self.stale(tokens, now)
        self._last[at] = now
        self._unfitted += 1
        key = at, int(kv).bit_length()
        cell = self._cells.get(key)
        if cell is None:
            if len(self._cells) >= CELLS_MAX:
                del self._cells[min(self._cells, key=lambda at: self._cells[at].last)]
            cell = self._cells[key] = _Cell(tokens, kv, seconds, 0, now)
            new = True
        rate = max(1.0 / max(cell.count, 1), CELL_RATE)
        cell.tokens += rate * (tokens - cell.tokens)
        cell.kv += rate * (kv - cell.kv)
        cell.seconds += rate * (min(seconds, OUTLIER * cell.seconds) - cell.seconds)
        cell.count += 1
        cell.last = now
        if new or cell.count == 2 or self._unfitted >= FIT_EVERY:
            self._fit()

    def _fit(self) -> None:
        """Interpolates anew what was seen."""
        self._unfitted = 0
        alike: dict[int, list[_Cell]] = {}
        for (at, _), cell in self._cells.items():
            alike.setdefault(at, []).append(cell)
        self.kv_s = _slope(alike.values())
        points = []
        for cells in alike.values():
            weights = [min(cell.count, COUNT_MAX) for cell in cells]
            tokens = _mean([cell.tokens for cell in cells], weights)
            bases_s = [max(cell.seconds - self.kv_s * cell.kv, 0.0) for cell in cells]
            points.append((tokens, _mean(bases_s, weights)))
        points.sort()
        self._tokens = [tokens for tokens, _ in points]
        self._seconds = [seconds for _, seconds in points]
        # Fewer tokens take no longer than more. Where it was seen otherwise the longer time is the
        # one to doubt: nothing is too fast by chance.
        for at in reversed(range(len(points) - 1)):
            self._seconds[at] = min(self._seconds[at], self._seconds[at + 1])
        if len(points) > 1:
            rise_s = self._seconds[-1] - self._seconds[0]
            self._rise_s = rise_s / (self._tokens[-1] - self._tokens[0])


def _mean(values: list[float], weights: list[int]) -> float:
    total: float = sum(map(mul, values, weights))
    return total / sum(weights)


def _slope(sets: Iterable[list[_Cell]]) -> float:
    """Seconds per KV position, by least squares of relative errors; not negative."""
    above = below = 0.0
    for cells in sets:
        kv = sum([cell.kv for cell in cells]) / len(cells)
        seconds = sum([cell.seconds for cell in cells]) / len(cells)
        if seconds:  # nothing is learned from what takes no time
            above += sum((cell.kv - kv) * cell.seconds for cell in cells) / seconds**2
            below += sum((cell.kv - kv) ** 2 for cell in cells) / seconds**2
    return max(above / below, 0.0) if below else 0.0


class LatencyTable:
    """One replica's table."""

    def __init__(self) -> None:
        self.step = Latencies()
        self.draft = Latencies()
        self.prefill = Latencies()
        self.slowdown = 1.0
        """Seconds now over usual seconds."""
        self._seen = 0
        """Times of steps and prefills."""

    @property
    def known(self) -> bool:
        """Whether steps of different widths were seen, and a draft pass."""
        return len(self.step) > 1 and len(self.draft) > 0

    def observe_step(
        self, rows: int, draft_len: int, kv: int, draft_s: float, rest_s: float
    ) -> None:
        """A step of `rows` rows with so many draft passes read `kv` KV positions; `rest_s` is its
        time but for drafting. A time of 0 tells nothing."""
        if rest_s <= 0.0:
            return
        tokens = rows * (draft_len + 1)
        usual_s = self.step.usual_s(tokens, kv)
        pass_s = self.draft.usual_s(rows, kv) if draft_len else 0.0
        if usual_s is not None and pass_s is not None:
            self._note_speed((draft_s + rest_s) / (usual_s + draft_len * pass_s))
        self._seen += 1
        self.step.observe(tokens, kv, rest_s / self.slowdown, self._seen)
        if draft_len:
            self.draft.observe(rows, kv, draft_s / draft_len / self.slowdown, self._seen)

    def observe_prefill(self, tokens: int, before: int, seconds: float) -> None:
        """A prefill batch filled `tokens` positions, which read `before` positions together."""
        if seconds <= 0.0 or tokens <= 0:
            return
        usual_s = self.prefill.usual_s(tokens, before)
        if usual_s is not None:
            self._note_speed(seconds / usual_s)
        self._seen += 1
        self.prefill.observe(tokens, before, seconds / self.slowdown, self._seen)

    def step_s(self, rows: int, draft_len: int, kv: int) -> float:
        """Expected seconds now of a step of so many rows, with `draft_len` draft passes, that reads
        `kv` KV positions in all; 0 while nothing was seen."""
        tokens = rows * (draft_len + 1)
        return self.slowdown * (self.step(tokens, kv) + draft_len * self.draft(rows, kv))

    def steps_s(self, rows: int, most: int, kv: int) -> list[float]:
        """Expected seconds now of a step of so many rows, by its draft length: 0 to `most`."""
        pass_s = self.draft(rows, kv)
        return [
            self.slowdown * (self.step(rows * (draft_len + 1), kv) + draft_len * pass_s)
            for draft_len in range(most + 1)
        ]

    def turns_s(self, rows: int, most: int, kv: int, idle_s: float) -> list[float]:
        """The same where two such batches take turns, one drafted while the other is checked;
        `idle_s`: what passes between a batch's end and the draft of its rows' next one."""
        pass_s, found = self.slowdown * self.draft(rows, kv), []
        for draft_len in range(most + 1):
            draft_s = draft_len * pass_s
            check_s = self.slowdown * self.step(rows * (draft_len + 1), kv)
            # Each device does the work of both; and a batch cannot be checked while it is drafted.
            found.append(max(check_s, draft_s, (check_s + draft_s + idle_s) / 2))
        return found

    def stale(self, rows: int, draft_len: int) -> bool:
        """Whether no step with so many tokens was seen lately."""
        return self.step.stale(rows * (draft_len + 1), self._seen)

    def prefill_s(self, tokens: int, begin: int) -> float:
        """Expected seconds now of filling so many positions of a row behind `begin` others."""
        return self.slowdown * self.prefill(tokens, tokens * begin)

    def _note_speed(self, ratio: float) -> None:
        """Known work took `ratio` times its usual time."""
        change = min(max(ratio / self.slowdown, 1 / OUTLIER), OUTLIER)
        self.slowdown *= 1.0 + SPEED_RATE * (change - 1.0)
