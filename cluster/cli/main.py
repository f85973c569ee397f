"""The command `lockstep`. Options only; what takes longer than parsing is imported when needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.bench import bench
from cluster.cli.keys import keys
from cluster.cli.options import (
    Address,
    BatchSize,
    CacheSalt,
    ConfigFile,
    Deterministic,
    Device,
    Draft,
    DraftLen,
    Dtype,
    KeyFile,
    Memory,
    Priority,
    ReplicaCount,
    Speculative,
    Target,
    TensorParallel,
    TlsCa,
    TlsCert,
    TlsKey,
    cluster_config,
    given_options,
    reached_server,
)
from cluster.cli.simulate import simulate

main = typer.Typer(
    name="lockstep",
    help="Serves language models with batch speculative decoding that changes no output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
main.add_typer(keys, name="keys")
main.command()(bench)
main.command()(simulate)


@main.command()
def serve(
    config: ConfigFile = None,
    target: Target = None,
    draft: Draft = None,
    speculative: Speculative = None,
    device: Device = None,
    dtype: Dtype = None,
    memory: Memory = None,
    tensor_parallel: TensorParallel = None,
    replicas: ReplicaCount = None,
    batch_size: BatchSize = None,
    draft_len: DraftLen = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC proxy.")] = None,
    http_host: Annotated[str | None, typer.Option(help="Address of the HTTP proxy.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the HTTP proxy.")] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option(help="API keys, made by `lockstep keys`.", exists=True, dir_okay=False),
    ] = None,
    allow_anyone: Annotated[
        bool, typer.Option("--allow-anyone", help="Serve everybody who reaches a port, no keys.")
    ] = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests may finish within the grace time."""
    given = given_options(
        target=target,
        draft=draft,
        speculative=speculative,
        device=device,
        dtype=dtype,
        memory=memory,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        batch_size=batch_size,
        draft_len=draft_len,
        grpc_port=grpc_port,
        http_host=http_host,
        http_port=http_port,
        keys_file=str(keys_file.resolve()) if keys_file else None,
        allow_anyone=allow_anyone or None,
    )
    settings = cluster_config(config, given)
    _check_doors(settings)
    from cluster.cli.serve import serve_until_signal

    raise typer.Exit(serve_until_signal(settings))


@main.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' reads it from stdin.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with 'prompt' or 'turns'.", exists=True)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate at most.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the smallest set with this mass.")
    ] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens above this share.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end of text.")] = False,
    speculation: Annotated[bool, typer.Option(help="Off: no drafting for these requests.")] = True,
    draft_len: DraftLen = None,
    priority: Priority = None,
    cache_salt: CacheSalt = None,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline of each request.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Generate text: streamed for one prompt, many in flight for a file, in the file's batch."""
    from cluster.cli import generate as cli_generate

    given = given_options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        stop_token_ids=stop_token_id,
        draft_len=draft_len,
        priority=None if priority is None else f"PRIORITY_{priority.name}",
        cache_salt=cache_salt,
        timeout_s=timeout_s,
    )
    if ignore_eos:
        given["ignore_eos"] = True
    if not speculation:
        given["speculation"] = False
    if (prompt is None) == (prompts is None):
        raise typer.BadParameter("give either a prompt or --prompts FILE")
    server = reached_server(address, api_key_file, tls_ca, tls_cert, tls_key)
    if prompt is not None:
        text = sys.stdin.read() if prompt == "-" else prompt
        code = cli_generate.one(server, text, given, as_json)
    else:
        assert prompts is not None
        code = cli_generate.many(server, prompts, limit, given, concurrency, as_json)
    raise typer.Exit(code)


@main.command()
def verify(
    prompts: Annotated[Path, typer.Option(help="JSON lines of prompts.", exists=True)],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a group.")] = 8,
    draft_len: DraftLen = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise, with a temperature.")] = 0,
    target: Annotated[str, typer.Option(help="Target.", metavar="NAME")] = "demo",
    draft: Draft = None,
    speculative: Speculative = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Compare every token with plain decoding of the target; status 1 if any differs."""
    from cluster.cli.verify import compare

    replica = {"target": target, "device": device, "dtype": dtype}
    replica |= given_options(draft=draft, speculative=speculative)
    given = {"batch_size": batch_size, "draft_len": draft_len, **replica}
    sampling = {"temperature": temperature, "seed": seed}
    config = cluster_config(None, given)
    raise typer.Exit(compare(config, prompts, limit, sampling, max_new_tokens))


@main.command()
def plan(
    config: ConfigFile = None,
    target: Target = None,
    draft: Draft = None,
    speculative: Speculative = None,
    memory: Memory = None,
    tensor_parallel: TensorParallel = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of a group.")] = None,
    draft_len: Annotated[
        int | None, typer.Option(min=0, help="Draft tokens per step, at most.")
    ] = None,
    context_len: Annotated[
        int | None, typer.Option(min=2, help="Longest sequence; else the target's own limit.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    deterministic: Deterministic = None,
    block_size: Annotated[int | None, typer.Option(help="KV positions per block.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, in bytes.")] = False,
) -> None:
    """How a replica, or each rank of it, would divide its memory, and what fits; reads no weights.

    With --config that of `lockstep serve --config`, but for what else is given. A GPU need not be
    here if --memory says what a replica has of it. Status 1 if not one sequence fits, with the
    least memory that would do.
    """
    given = given_options(
        target=target,
        draft=draft,
        speculative=speculative,
        memory=memory,
        tensor_parallel=tensor_parallel,
        context_len=context_len,
        device=device,
        dtype=dtype,
    )
    replica = given_options(
        plan_rows=rows,
        plan_draft_len=draft_len,
        deterministic=deterministic,
        block_size=block_size,
    )
    settings = cluster_config(config, given, replica)
    from cluster.cli.plan import planned_of, print_plan

    raise typer.Exit(print_plan(planned_of(settings), as_json))


@main.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    address: Address = None,
    api_key_file: KeyFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """What the pool and its replicas are doing."""
    from cluster.cli.serve import print_status

    server = reached_server(address, api_key_file, tls_ca, tls_cert, tls_key)
    raise typer.Exit(print_status(server, as_json))


@main.command()
def chat(
    system: Annotated[str | None, typer.Option(help="The system's turn.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer, at most.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    address: Address = None,
    api_key_file: KeyFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Talk with the model of a running server; Ctrl-C stops an answer, Ctrl-D ends."""
    from cluster.cli.chat import chat as talk

    server = reached_server(address, api_key_file, tls_ca, tls_cert, tls_key)
    given = given_options(max_new_tokens=max_new_tokens, temperature=temperature)
    raise typer.Exit(talk(server, system, given))


@main.command()
def demo(
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 64,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC proxy.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the HTTP proxy.")] = None,
) -> None:
    """Start a cluster, stream eight answers, compare them with plain decoding, stop everything."""
    from cluster.cli.demo import run_demo

    given = given_options(replicas=replicas, grpc_port=grpc_port, http_port=http_port)
    raise typer.Exit(run_demo(cluster_config(None, given), max_new_tokens))


def _check_doors(config: Any) -> None:
    from cluster.config import ConfigError, check_doors
    from cluster.frontend.admission.keys import read

    try:
        check_doors(config)
        if config.auth.keys_file is not None:
            read(Path(config.auth.keys_file))
    except (ConfigError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


if __name__ == "__main__":
    main()
