"""What the command lines of benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from replicas.config import ReplicaConfig, SpeculativeConfig


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Introduced by the first line of what its module says about itself; with `--json`."""
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Options of the pair that runs in this process, for `pair_config`."""
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=None, help="torch's intra-op threads")


def pair_config(args: argparse.Namespace) -> ReplicaConfig:
    """Without prefix sharing: the same prompts come in every round."""
    return ReplicaConfig(
        target=args.target,
        speculative_config=SpeculativeConfig(method="draft_model", model=args.draft),
        device=args.device,
        dtype=args.dtype,
        torch_threads=args.threads,
        prefix_sharing=False,
    )
