"""A straight line fitted online to what work takes: the regression behind the cost model.

Work is so many tokens and KV positions, and took so many seconds. Knows numbers only.
"""

from __future__ import annotations

import math
from functools import lru_cache
from math import log2
from struct import Struct

from scheduler.draft_length.estimates import LinearCost

CELLS_MAX = 48
"""Distinct kinds of work that a fit remembers; the least recently seen goes first."""
FADE = 0.98
"""What the weight of a cell keeps of itself while the fit sees one other observation."""
WEIGHT_LEAST = 0.02
"""Old cells count that much at least: without them a fit forgets what other work costs."""
RECENT = 0.15
"""Weight of a new time in the mean of its cell, once the cell has seen enough."""
_COUNT_RECENT = math.ceil(1.0 / RECENT)
_FEW = 8
"""Observations of which each one counts."""
COMMON = 0.8
"""Of a change in what known work takes, the part that is put down to the machine and so holds for
all work: its speed changes with what else it does, or with its heat. Work that is seen all the time
would follow such a change alone, and look the dearer beside all that is seen seldom."""
SURE = 2
"""Observations of which the least counts. The first of a kind is often slow, for code is made for
it or memory is fetched; and what looks dear is not chosen, so nothing would ever put it right."""
LATER = 256
"""Observations after which what was seen once is hoped to have been slow by chance."""
DOUBT = 1.0
"""As many observations as the line counts where a number of tokens is priced by what it took."""
BEYOND = 4
"""Cells beyond the most tokens seen for which there is hope: an octave."""
RATIO_MOST = 8.0
"""The greatest of `Fit.ratios`: no tile is that wasteful."""
OUTLIER = 3.0
"""A time so many times the mean of its cell counts as that much only: the machine hiccupped."""


@lru_cache(4096)
def tokens_key(tokens: int) -> int:
    """Cells are a quarter of an octave of tokens wide."""
    return round(4 * log2(tokens + 1))


_CELL = Struct("dddqq")
"""Means of the tokens, KV positions and seconds of nearly the same work, how many observations they
are, as far as that matters, and which of the fit's was the last. Seconds are those at pace 1."""
_KV_KEYS = 256
"""More than there are kinds of KV positions."""


class Fit:
    """A `LinearCost` fitted to (tokens, KV positions, seconds), the relative error weighted.

    Observations of like work fall into one cell, so what happens a thousand times does not outweigh
    what happens seldom, and a cost that changes is followed.

    A pool has some of these for each replica, and none is in a cache when its turn comes: so cells
    are plain numbers side by side.
    """

    __slots__ = (
        "_begins",
        "_cells",
        "_cost",
        "_kinds",
        "_new",
        "_pace",
        "_seen",
        "_solved_at",
        "_unsure",
        "ratios",
    )

    def __init__(self) -> None:
        self._cells = bytearray()
        self._begins: dict[int, int] = {}
        """Where the cell of a key begins."""
        self._seen = 0
        self._solved_at = 0
        """Observations that `_cost` knows."""
        self._cost = LinearCost()
        self._new = False
        """Whether a number of tokens was seen that `is_new`."""
        self._unsure: dict[int, int] = {}
        """Keys of `ratios` that stand for fewer than SURE observations, and which was the last."""
        self._kinds: int | None = 0
        """None: to be counted anew."""
        self._pace = 1.0
        """What work takes now, over what its cell says."""
        self.ratios: dict[int, float] = {}
        """By `tokens_key`: what so many tokens take over what `cost` says. Hardware computes tokens
        in whole tiles, so a time rises in steps, and a line misses it where it matters: between one
        draft length and the next. Replaced whenever the line is fitted anew, never changed."""

    def observe(self, tokens: int, kv: float, seconds: float, times: int = 1) -> None:
        """One piece of work that took `seconds`; what is not positive tells nothing. `times`: the
        first of its kind was seen so often, and this is the median."""
        if seconds <= 0.0:
            return
        self._seen += 1
        self._new = self._new or self.is_new(tokens)
        key = tokens_key(tokens) * _KV_KEYS
        if kv:
            key += round(2 * log2(kv + 1))
        begin = self._begins.get(key)
        if begin is None:
            begin = self._begins[key] = self._place()
            _CELL.pack_into(self._cells, begin, tokens, kv, seconds / self._pace, times, self._seen)
            return
        mean_tokens, mean_kv, mean_s, count, _ = _CELL.unpack_from(self._cells, begin)
        pace, line = self._pace, self._cost
        expected_s = mean_s * pace
        usual_s, this_s = line(mean_tokens, mean_kv), line(tokens, kv)
        if usual_s > 0.0 and this_s > 0.0:
            expected_s *= this_s / usual_s
        if count >= SURE and seconds > OUTLIER * expected_s:
            seconds = OUTLIER * expected_s
        if count < SURE:
            count += 1
            rate = 1.0 if seconds < expected_s else 0.0
        elif count < _COUNT_RECENT:
            count += 1
            rate = 1.0 / count
        else:
            rate = RECENT
            common_s = COMMON * (seconds - expected_s)
            seconds -= common_s
            self._pace *= 1.0 + rate * common_s / expected_s
        mean_tokens += rate * (tokens - mean_tokens)
        mean_kv += rate * (kv - mean_kv)
        mean_s += rate * (seconds / pace - mean_s)
        _CELL.pack_into(self._cells, begin, mean_tokens, mean_kv, mean_s, count, self._seen)

    def _place(self) -> int:
        """Where a new cell begins; of too many the least recently seen goes."""
        self._kinds = None
        begins = self._begins
        if len(begins) < CELLS_MAX:
            self._cells += bytes(_CELL.size)
            return len(self._cells) - _CELL.size
        seen = {key: _CELL.unpack_from(self._cells, begin)[-1] for key, begin in begins.items()}
        return begins.pop(min(seen, key=lambda key: seen[key]))

    @property
    def kinds(self) -> int:
        """Distinct numbers of tokens seen: a slope needs two."""
        if self._kinds is None:
            self._kinds = len({key // _KV_KEYS for key in self._begins})
        return self._kinds

    def cost(self) -> LinearCost:
        """The fit as it stands; recomputed seldom once much was seen, for it takes its time."""
        stale = self._seen - self._solved_at
        if (
            stale > self._seen // 3
            or (stale and self._seen <= _FEW)
            or stale > 4 * len(self._begins)
            or self._new
        ):
            self._solved_at, self._new = self._seen, False
            self._cost = self._solve()
            self.ratios = self._ratios(self._cost)
        return self._cost

    def _solve(self) -> LinearCost:
        """Least squares of the relative error, without negative parts."""
        tokens_sum = kv_sum = 0.0
        now = self._seen
        w = wt = wk = wtt = wtk = wkk = ws = wts = wks = 0.0
        for tokens, kv, seconds, count, last in _CELL.iter_unpack(self._cells):
            weight = FADE ** (now - last)
            if weight < WEIGHT_LEAST:
                weight = WEIGHT_LEAST
            weight *= (count if count < 4 else 4) / (seconds * seconds)
            tokens_sum += tokens
            kv_sum += kv
            weighted_tokens, weighted_kv = weight * tokens, weight * kv
            w += weight
            wt += weighted_tokens
            wk += weighted_kv
            wtt += weighted_tokens * tokens
            wtk += weighted_tokens * kv
            wkk += weighted_kv * kv
            ws += weight * seconds
            wts += weighted_tokens * seconds
            wks += weighted_kv * seconds
        # Columns of like size, so that one small ridge suits all.
        t = max(tokens_sum / len(self._begins), 1e-30)
        k = max(kv_sum / len(self._begins), 1e-30)
        scale = (1.0, t, k)
        matrix = [
            [w, wt / t, wk / k],
            [wt / t, wtt / t**2, wtk / (t * k)],
            [wk / k, wtk / (t * k), wkk / k**2],
        ]
        right = [ws, wts / t, wks / k]
        # What little was seen does not tell apart counts as fixed: small passes are bound by
        # launches. So a slope is taken too low rather than too high, and then soon tried.
        ridge = 1e-6 * max(matrix[i][i] for i in range(3))
        for i in (1, 2):
            matrix[i][i] += ridge
        matrix[0][0] += 1e-6 * ridge
        kept = [0, 1, 2]
        while True:
            found = _solve_linear(
                [[matrix[i][j] for j in kept] for i in kept], [right[i] for i in kept]
            )
            worst = min(range(len(kept)), key=lambda at: found[at])
            if found[worst] >= 0.0 or len(kept) == 1:
                break
            del kept[worst]
        parts = [0.0] * 3
        for i, value in zip(kept, found, strict=True):
            parts[i] = self._pace * max(value, 0.0) / scale[i]
        return LinearCost(*parts)

    def is_new(self, tokens: int) -> bool:
        """Whether so many tokens were not seen often enough to be sure, or that is not learned."""
        at = tokens_key(tokens)
        return at not in self.ratios or at in self._unsure

    def _ratios(self, line: LinearCost) -> dict[int, float]:
        """`ratios` to this line; that of what was seen seldom is near 1, and that of what no cell
        remembers as it was."""
        weights: dict[int, float] = {}
        ratios: dict[int, float] = {}
        few: dict[int, tuple[int, float, int]] = {}
        """Of cells of fewer than SURE observations: how many, the least ratio, the last of them."""
        for key, begin in self._begins.items():
            tokens, kv, seconds, count, last = _CELL.unpack_from(self._cells, begin)
            said_s = line(tokens, kv)
            if said_s <= 0.0:
                continue
            at = key // _KV_KEYS
            ratio = min(self._pace * seconds / said_s, RATIO_MOST)
            if count >= SURE:
                weights[at] = weights.get(at, DOUBT) + count
                ratios[at] = ratios.get(at, DOUBT) + count * ratio
            else:
                before, least, latest = few.get(at, (0, RATIO_MOST, 0))
                few[at] = (before + count, min(least, ratio), max(latest, last))
        for at in weights:
            self._unsure.pop(at, None)
        for at, (count, ratio, last) in few.items():
            if at not in weights:
                weights[at], ratios[at] = DOUBT + count, DOUBT + count * ratio
                self._unsure.pop(at, None)
                if count < SURE:
                    self._unsure[at] = last
        return self.ratios | {at: ratio / weights[at] for at, ratio in ratios.items()}

    def hopes(self) -> dict[int, float]:
        """`ratios`, and the least ones of numbers that were not seen, or once and long ago: more
        tokens take at least as long as fewer, and within a tile no longer."""
        line, hopes = self._cost, dict(self.ratios)
        if not hopes:
            return hopes
        usual_kv = sum([cell[1] for cell in _CELL.iter_unpack(self._cells)]) / len(self._begins)
        below_s = 0.0
        for at in range(min(hopes), max(hopes) + BEYOND + 1):
            said_s = line(2.0 ** (at / 4) - 1.0, usual_kv)  # in the middle of the cell
            again = at in self._unsure and self._seen - self._unsure[at] >= LATER
            if at in hopes and not (again and 0.0 < below_s < hopes[at] * said_s):
                below_s = hopes[at] * said_s
            elif said_s > 0.0:
                hopes[at] = min(below_s / said_s, RATIO_MOST)
        return hopes


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with pivots, for up to three unknowns; changes its arguments."""
    size = len(right)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        right[column], right[pivot] = right[pivot], right[column]
        for row in range(column + 1, size):
            factor = matrix[row][column] / matrix[column][column]
            for at in range(column, size):
                matrix[row][at] -= factor * matrix[column][at]
            right[row] -= factor * right[column]
    found = [0.0] * size
    for row in reversed(range(size)):
        known = 0.0  # added one by one: `sum` rounds otherwise since Python 3.12
        for at in range(row + 1, size):
            known += matrix[row][at] * found[at]
        found[row] = (right[row] - known) / matrix[row][row]
    return found
