"""`lockstep train-drafter`: its options and its words. The work is in `cluster.training`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cluster.cli.flags import with_settings

SETTINGS = (
    *("target", "device", "dtype", "context_len", "num_gpu_blocks_override", "memory"),
    *("torch_threads", "trust_remote_code", "chat_template"),
)
"""Of the replica that writes conversations and measures the head."""


@with_settings(*(f"replica.{name}" for name in SETTINGS), model=True)
def train_drafter(
    settings: Any,
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, the head, its card and report.")
    ],
    method: Annotated[
        Literal["eagle3", "dspark", "clover"],
        typer.Option(
            help="Kind of drafter: an EAGLE-3 head, a DSpark head, which drafts a block in one"
            " pass, or a Clover-2 head."
        ),
    ] = "eagle3",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Conversations: JSON lines with 'messages' that end with the assistant's."
            " Default: the target writes its own.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    self_generated: Annotated[
        int | None,
        typer.Option(min=64, help="Conversations that the target writes. Default: 4000."),
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Minutes of training, without the preparation of data.")
    ] = 60.0,
    intermediate_size: Annotated[
        int | None, typer.Option(min=8, help="Width of the head's MLP. Default: the target's.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of tokens that the head learns, the most frequent. Default: 10240.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that train together, by Ray if several.")
    ] = 1,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out from its checkpoint.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Questions to measure acceptance by: JSON lines with 'prompt' or 'turns'. Default:"
            " held-out conversations.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    laws: Annotated[
        bool,
        typer.Option(
            "--laws",
            help="Divide the minutes among heads of three sizes, measure each after four token"
            " counts, and report what more tokens and a larger head would gain.",
        ),
    ] = False,
    checkpoint_minutes: Annotated[
        float,
        typer.Option(min=0.05, help="Minutes between checkpoints: what a kill loses at most."),
    ] = 5.0,
    cache_gib: Annotated[
        float,
        typer.Option(min=0.01, help="Maximum size of the cache of conversations and features."),
    ] = 20.0,
    seed: Annotated[int, typer.Option(min=0, max=2**20, help="Seed of data and weights.")] = 0,
) -> None:
    """Train a head that drafts for a target.

    The cache directory keeps the target's conversations and hidden states. --resume continues an
    interrupted run. Serve the head with --speculative-config
    '{"method": METHOD, "model": DIR}'.
    """
    if data is not None and self_generated is not None:
        raise typer.BadParameter("give either --data or --self-generated")
    if laws and workers > 1:
        raise typer.BadParameter("--laws cannot be combined with --workers")
    from cluster.local.console import Bars, console
    from cluster.training.job import Job
    from cluster.training.laws import measure_laws
    from cluster.training.report import write_report
    from cluster.training.settings import JobSettings
    from cluster.worker.loading import tell_of_weights
    from replicas.errors import PairRefused, TrainingRefused

    job_settings = JobSettings(
        out=out,
        data=data,
        method=method,
        self_generated=self_generated or 4000,
        minutes=minutes,
        draft_vocab=draft_vocab,
        intermediate_size=intermediate_size,
        workers=workers,
        resume=resume,
        prompts=prompts,
        checkpoint_minutes=checkpoint_minutes,
        cache_gib=cache_gib,
        seed=seed,
    )
    told = console()
    tell_of_weights(lambda done, total: None)
    command = " ".join(["lockstep", *sys.argv[1:]])
    try:
        with Bars() as bars:
            job = Job(job_settings, settings.replica, told.print, bars.note)
            if laws:
                told.print("\n".join(measure_laws(job, minutes).said))
                return
            outcome = job.run()
        write_report(out, command, job, outcome)
    except KeyboardInterrupt:
        console(stderr=True).print(f"Interrupted; --resume goes on with the run in {out}.")
        raise typer.Exit(130) from None
    except (TrainingRefused, PairRefused, ValueError) as error:
        console(stderr=True).print(str(error))
        raise typer.Exit(2) from None
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        reason = os.strerror(error.errno) if error.errno else str(error)
        console(stderr=True).print(f"{place}{reason}. --resume goes on with the run in {out}.")
        raise typer.Exit(1) from None
    told.print(f"{outcome.acceptance.said()} in {out}")
