"""Loads the demo pair into a budget, serves long prompts from it, prints what it took; `python -m`.

A process of its own, because what other tests leave in a process's heap would be used again.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import re
import sys
from pathlib import Path

import torch

from cluster.local.engine import LocalEngine
from replicas.config import ReplicaConfig
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request, Sampling


def serve(memory: str, requests: int) -> int:
    """Runs so many requests of up to 900 tokens, half of them sampled; returns the KV blocks."""
    replica = Replica.load(ReplicaConfig(target="tiny", device="cpu", memory=memory))
    rng = random.Random(requests)
    engine = LocalEngine(replica, SchedulerConfig())
    engine.generate(
        [
            Request(
                str(number),
                tuple(rng.randrange(4, 4000) for _ in range(rng.choice([300, 800, 900]))),
                6,
                Sampling(temperature=float(number % 2), top_p=0.9, top_k=50, seed=number),
            )
            for number in range(requests)
        ]
    )
    return replica.spec.kv_blocks


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def main() -> None:
    torch.set_num_threads(1)
    # Libraries and kernels are a process's own; memory that this run frees must not be used again.
    serve("80MiB", 2)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    blocks = serve(sys.argv[1], 8)
    print(json.dumps({"kv_blocks": blocks, "growth_bytes": resident("VmHWM") - before}))


if __name__ == "__main__":
    main()
