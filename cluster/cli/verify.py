"""What `lockstep verify` does: run, compare, print how many are identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from cluster.cli.console import Bars, console
from cluster.config import ClusterConfig
from cluster.prompts import PromptsError, read_prompts
from cluster.verify import VerifyReport, verify
from scheduler.errors import InvalidRequest
from scheduler.messages import SamplingParams


def compare(
    config: ClusterConfig,
    path: Path,
    limit: int | None,
    sampling: dict[str, Any],
    max_new_tokens: int,
) -> int:
    """Compare the outputs for a file of prompts. Returns the exit status, 1 if any differs by more
    than a tie below the noise of float32."""
    transformers_logging.disable_progress_bar()
    try:
        prompts = read_prompts(path, limit)
        with Bars() as bars:
            report = verify(
                prompts,
                config.planned_replica,
                config.scheduler,
                SamplingParams(**sampling),
                max_new_tokens,
                bars.note,
            )
    except (PromptsError, InvalidRequest, OSError, ValueError) as error:
        console(stderr=True).print(str(error))
        return 2
    _print(report)
    return 1 if len(report.differences) > report.ties else 0


def _print(report: VerifyReport) -> None:
    out = console()
    share = report.accepted_tokens / report.draft_tokens if report.draft_tokens else 0.0
    out.print(f"against {report.against}: {report.tokens} tokens, {share:.1%} of drafts accepted")
    out.print(f"{report.identical} of {report.prompts} outputs identical")
    if report.ties:
        out.print(f"{report.ties} part at a tie below the noise of float32")
    for difference in report.differences:
        out.print(
            f"  prompt {difference.prompt}: first difference at new token {difference.position}: "
            f"expected {difference.expected}, got {difference.got}"
        )
        judged = difference.judgement
        if judged is not None:
            out.print(
                f"    in float64 the expected logit is {judged.gap:+.1e} above the other and token"
                f" {judged.choice} is chosen; the error of transformers' float32 is"
                f" {judged.error_expected:.1e}, of Lockstep's {judged.error_got:.1e}:"
                f" {'a tie' if judged.tie else 'no tie'}"
            )
