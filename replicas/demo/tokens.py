"""From documents to token ids: the tokenizer, packed training rows, and prompts.

Knows nothing about models. Every draw comes from a `random.Random` that the caller seeds.
"""

import random
from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from replicas.demo.corpus import Document

VOCAB_SIZE = 4096
EOS = "<|endoftext|>"
CONTEXT = 1024


def train_tokenizer(documents: Sequence[Document]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so any text has ids and ids have text; eos parts the documents."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document.text for document in documents for _ in range(document.repeats))
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


class TokenStore:
    """The token ids of one side of the split, one list per document, eos not included."""

    def __init__(self, documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast) -> None:
        self.eos_id: int = tokenizer.convert_tokens_to_ids(EOS)
        self.ids: list[list[int]] = tokenizer([d.text for d in documents], verbose=False).input_ids
        self.repeats = [d.repeats for d in documents]
        self._break_ids = {
            token_id
            for token, token_id in tokenizer.get_vocab().items()
            if token.endswith("ĊĊ") or token == "Ċ"  # a newline, in the byte-level alphabet
        }

    def pass_tokens(self) -> int:
        """Tokens in one pass, repeats and eos included."""
        return sum((len(ids) + 1) * n for ids, n in zip(self.ids, self.repeats, strict=True))

    def stream(self, rng: random.Random) -> Iterator[int]:
        """Documents without end, in a new order at every pass, an eos after each."""
        order = [i for i, n in enumerate(self.repeats) for _ in range(n)]
        while True:
            rng.shuffle(order)
            for i in order:
                yield from self.ids[i]
                yield self.eos_id

    def batches(
        self, shapes: Sequence[tuple[int, int]], rng: random.Random
    ) -> Iterator[torch.Tensor]:
        """Packed rows without end; the shapes [rows, tokens] take turns. Yields [rows, tokens]."""
        stream = self.stream(rng)
        while True:
            for rows, length in shapes:
                flat = [next(stream) for _ in range(rows * length)]
                yield torch.tensor(flat).view(rows, length)

    def prompts(self, rows: int, length: int, rng: random.Random) -> torch.Tensor:
        """Stretches of documents that begin at a document's or a line's start. [rows, length]."""
        fitting = [ids for ids in self.ids if len(ids) >= length]
        if not fitting:
            raise ValueError(f"no document has {length} tokens")
        found: list[list[int]] = []
        while len(found) < rows:
            ids = rng.choice(fitting)
            starts = [0] + [i + 1 for i in range(len(ids) - length) if ids[i] in self._break_ids]
            start = 0 if rng.random() < 0.25 else rng.choice(starts)
            found.append(ids[start : start + length])
        return torch.tensor(found)
