"""Whether a loaded model is batch-invariant: measured bit for bit, in the passes that serve it.

The trial runs the model over a small paged cache of its own, in ragged groups, draft windows and
packed windows as steps do, long enough to cross a boundary of token tiles and one of KV chunks. It
is over before the replica's cache is allocated, so it takes memory that is planned for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from replicas.buffers import ModelShape
from replicas.model import PagedModel
from replicas.paged_cache import PagedCache
from replicas.tiles import TILES
from replicas.windows import CacheShape, Layout

_EDGE = 24
"""Positions at the beginning that are computed one by one, and those beyond the first chunk."""
_BEFORE = 8
"""Positions before the end of the first chunk that are computed one by one."""
_ROWS = 3
_BLOCK_SIZE = 16


@torch.inference_mode()
def check_invariance(model: PreTrainedModel, context_len: int | None = None) -> str | None:
    """What the model's logits change with, bit for bit: None when with nothing that was tried.

    Compares a sequence alone, one token after the other at its edges, with the same sequence in
    wide passes, in draft windows of several widths, in a batch, beside longer and shorter rows, and
    where only some tokens of a window are computed. A shorter context holds a shorter trial.
    """
    trial = _Trial(model, context_len or model.config.max_position_embeddings)
    return trial.run()


class _Trial:
    """Random sequences, and the logits that each has alone."""

    def __init__(self, model: PreTrainedModel, context_len: int) -> None:
        device = model.device
        tiles = TILES[device.type]
        self._length = n = min(tiles.chunk + _EDGE, context_len)
        rows = _ROWS if _ROWS * n <= context_len else 2
        self._wide = min(tiles.rows + 8, n)
        """More than a tile holds."""
        shape = ModelShape.of(model.config)
        blocks = -(-n // _BLOCK_SIZE)
        sizes = (shape.layers, shape.kv_heads, shape.head_dim, rows * blocks, _BLOCK_SIZE)
        self._model = PagedModel(model, PagedCache(*sizes, model.dtype, device))
        self._shape = CacheShape(_BLOCK_SIZE, n, model.dtype)
        self._model.try_out(self._shape, fuse=False)
        self._table = 1 + torch.arange(rows * blocks, device=device).view(rows, blocks)
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(self._model.vocab, (rows, n), generator=generator).to(device)
        self._every = range(rows)
        self._alone: list[dict[int, torch.Tensor]] = []
        """Of each row: its logits, [vocab], by position."""

    def run(self) -> str | None:
        tail = min(_EDGE + _BEFORE, self._length)
        head = self._length - tail
        edge = [1] * min(_EDGE, head)
        for row in self._every:
            begun = self._widths(head - len(edge))
            self._alone.append({})
            self._differs([row], [*edge, *begun, *[1] * tail], note=True)
        whole, to_tail = self._widths(self._length), self._widths(head)
        cut = partial(_cut, tail)
        trials: dict[str, Callable[[], bool]] = {
            "the number of tokens per pass": partial(self._differs, [0], whole),
            "the draft length": partial(
                self._differs, [0], [*to_tail, *cut((7, 1, 2, 9, 3, 5, 4))]
            ),
            "the batch": partial(self._differs, self._every, whole),
            "the batch and the draft length": partial(
                self._differs, self._every, [*to_tail, *cut((5, 8, 2, 1))]
            ),
            "batch mates' length": self._beside_longer,
            "the number of tokens verified": self._packed,
        }
        return next((name for name, differs in trials.items() if differs()), None)

    def _widths(self, length: int) -> list[int]:
        return _cut(length, (self._wide,))

    def _differs(self, rows: Sequence[int], widths: Sequence[int], note: bool = False) -> bool:
        """Whether rows in passes of these widths, from their beginning, get other logits."""
        begin = 0
        for width in widths:
            if self._pass(rows, [begin] * len(rows), width, note):
                return True
            begin += width
        return False

    def _beside_longer(self) -> bool:
        """The first row begins anew where the others end."""
        n, width = self._length, min(_BEFORE, self._length // 3)
        others = [n - (2 + i % 2) * width for i in self._every[1:]]
        return any(
            self._pass(self._every, [step * width, *(one + step * width for one in others)], width)
            for step in range(2)
        )

    def _packed(self) -> bool:
        """The last positions, of every row another number of them."""
        if not self._model.packs:
            return False
        width = min(_BEFORE, self._length)
        starts = [self._length - width] * len(self._every)
        counts = [1 + (3 * row + 2) % width for row in self._every]
        cells = [row * width + i for row, count in enumerate(counts) for i in range(count)]
        return self._pass(self._every, starts, width, cells=cells)

    def _pass(
        self,
        rows: Sequence[int],
        starts: list[int],
        width: int,
        note: bool = False,
        cells: list[int] | None = None,
    ) -> bool:
        """Compute a window, and compare or note the logits of its last positions."""
        device = self._tokens.device
        window = Layout(self._table[list(rows)], starts, width, self._shape).window(0, width)
        tokens = torch.stack(
            [
                self._tokens[row, begin : begin + width]
                for row, begin in zip(rows, starts, strict=True)
            ]
        )
        kept = min(width, _EDGE + _BEFORE)
        if cells is None:
            logits = self._model.forward(tokens, window, logits_to_keep=kept)
        else:
            chosen = torch.tensor(cells, device=device)
            flat = self._model.forward(tokens.reshape(-1)[chosen][None], window.packed(chosen))
            logits = flat.new_zeros((len(rows) * width, flat.shape[-1]))
            logits = logits.index_copy_(0, chosen, flat[0]).view(len(rows), width, -1)
        for index, (row, begin) in enumerate(zip(rows, starts, strict=True)):
            known = self._alone[row]
            for column in range(kept):
                position = begin + width - kept + column
                if note:
                    known[position] = logits[index, column].clone()
                elif cells is not None and index * width + width - kept + column not in cells:
                    continue
                elif position in known and not torch.equal(logits[index, column], known[position]):
                    return True
        return False


def _cut(length: int, widths: Sequence[int]) -> list[int]:
    """Pieces of these widths, in turns, as long as there is something to cut."""
    pieces: list[int] = []
    while length > 0:
        pieces.append(min(widths[len(pieces) % len(widths)], length))
        length -= pieces[-1]
    return pieces
