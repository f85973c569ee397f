"""Planted models for replicas on one device and on several, and what they are asked."""

from __future__ import annotations

import torch

from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.parallel.parallel_replica import ParallelReplica
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.decoding import Decoding
from scheduler.messages import Request, Sampling

NEW = 16
DECODING = Decoding(17, ((5, 3.5), (7, -100.0)), repetition_penalty=1.3, logprobs=2)
"""What one of the requests asks of choosing."""


def config(shape: str, **more: object) -> ReplicaConfig:
    return ReplicaConfig(
        **{
            "target": f"planted:{shape}?scale=0.8&layers=2",
            "speculative_config": {"method": "draft_model", "model": "planted:tiny-draft"},
            "device": "cpu",
            "torch_threads": 1,
            "block_size": 4,
            "num_gpu_blocks_override": 512,
            "calibrate": False,
            **more,
        }
    )


def run(
    replica: Replica | ParallelReplica, batch: int, k: int, vocab: int = 512
) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    requests = [
        Request(
            str(i),
            tuple(torch.randint(vocab, (3 + 7 * i,), generator=generator).tolist()),
            NEW,
            sampling=Sampling(temperature=0.8 * (i % 2), seed=i),
            decoding=DECODING if i == 2 else None,
        )
        for i in range(5)
    ]
    engine = LocalEngine(replica, SchedulerConfig(rows_max=batch, draft_len=k))
    return [output.tokens for output in engine.generate(requests)]
