"""The language of the golden traces, and the way to write them anew.

A trace is a text file. A line that starts with `>` is an event, with the time in seconds first; the
indented lines below it are the actions that it led to, `nothing` if there are none. A `config` line
comes before the first event. Everything from `#` on is a comment.

    config rows_max=2 draft_len=3
    > 0.0 join r blocks=10 block=4 context=64 vocab=100
    > 0.1 submit a prompt=1,2,3 max=4 stop=9 draft=2 timeout=1 seed=5 committed=7,8
    > 0.1 submit b prompt=1 max=4 priority=2 tenant=x
    > 0.2 done r 1                  # a prefill, or one token (1) per row
    > 0.3 done r 2 a=5,6 b=7        # tokens per row of the batch
    > 0.4 fail r 3 out of memory
    > 0.5 cancel a
    > 0.6 drain r
    > 0.7 lose r                    # it died; with `leave r` it went by itself
    > 0.8 tick

Run `python -m tests.sim.trace` to write the actions of all traces anew, then read the difference
and commit only what you understand.
"""

from __future__ import annotations

from pathlib import Path

from scheduler.config import SchedulerConfig
from scheduler.messages import (
    Action,
    Batch,
    BatchKind,
    Cancel,
    Dispatch,
    Emit,
    Event,
    Finish,
    Interrupt,
    PrefillRow,
    Priority,
    RecordFailure,
    Reject,
    Release,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLost,
    ReplicaSpec,
    Request,
    RowResult,
    SamplingParams,
    StepDone,
    StepFailed,
    StepResult,
    Submit,
    Tick,
)
from scheduler.scheduler import Scheduler

GOLDEN = Path(__file__).parent / "golden"


def replay(text: str) -> str:
    """The trace with its actions as the scheduler gives them now; all else is kept."""
    out: list[str] = []
    scheduler = Scheduler()
    batches: dict[tuple[str, int], Batch] = {}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if line.startswith(" "):
            continue
        out.append(line)
        if not words:
            continue
        if words[0] == "config":
            values = {key: float(value) for key, value in _pairs(words[1:]).items()}
            # Most traces are about other things than blocks that run out.
            scheduler = Scheduler(SchedulerConfig(**{"kv_reserve": 1.0, **values}))
            continue
        assert words[0] == ">", f"neither an event nor a comment: {line!r}"
        actions = scheduler.step(_event(words[2:], batches), float(words[1]))
        scheduler.check_integrity()
        for action in actions:
            if isinstance(action, Dispatch):
                batches[action.batch.replica_id, action.batch.id] = action.batch
        out.extend(f"    {shown}" for shown in [_show(one) for one in actions] or ["nothing"])
    return "\n".join(out) + "\n"


def _pairs(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def _tokens(text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in text.split(",") if token)


def _event(words: list[str], batches: dict[tuple[str, int], Batch]) -> Event:
    name, rest = words[0], words[1:]
    match name:
        case "tick":
            return Tick()
        case "cancel":
            return Cancel(rest[0])
        case "drain":
            return ReplicaDraining(rest[0])
        case "lose":
            return ReplicaLost(rest[0])
        case "leave":
            return ReplicaLost(rest[0], by_batch=False)
        case "fail":
            return StepFailed(rest[0], int(rest[1]), " ".join(rest[2:]))
        case "join":
            fields = _pairs(rest[1:])
            spec = ReplicaSpec(
                kv_blocks=int(fields.get("blocks", 100)),
                block_size=int(fields.get("block", 4)),
                context_len=int(fields.get("context", 100)),
                vocab_size=int(fields.get("vocab", 100)),
            )
            return ReplicaJoined(rest[0], spec)
        case "submit":
            return Submit(_request(rest[0], _pairs(rest[1:])))
        case "done":
            return StepDone(_result(rest[0], int(rest[1]), _pairs(rest[2:]), batches))
    raise ValueError(f"unknown event {name!r}")


def _request(name: str, fields: dict[str, str]) -> Request:
    return Request(
        id=name,
        prompt=_tokens(fields["prompt"]),
        max_new_tokens=int(fields["max"]),
        sampling=SamplingParams(seed=int(fields.get("seed", 0))),
        stop_token_ids=_tokens(fields.get("stop", "")),
        draft_len=int(fields["draft"]) if "draft" in fields else None,
        timeout_s=float(fields["timeout"]) if "timeout" in fields else None,
        committed=_tokens(fields.get("committed", "")),
        priority=Priority(int(fields.get("priority", 1))),
        tenant=fields.get("tenant", ""),
    )


def _result(
    replica_id: str, batch_id: int, tokens: dict[str, str], batches: dict[tuple[str, int], Batch]
) -> StepResult:
    """One step; all new tokens of a row but the last were accepted draft tokens."""
    batch = batches.get((replica_id, batch_id))
    if batch is None or batch.kind is BatchKind.PREFILL:
        rows = tuple(RowResult(row.sequence_id) for row in batch.prefill) if batch else ()
        return StepResult(batch_id, replica_id, rows)
    results = []
    for row in batch.rows:
        new = _tokens(tokens.get(row.sequence_id, "1"))
        accepted_at = tuple(int(place < len(new) - 1) for place in range(row.draft_len))
        results.append(RowResult(row.sequence_id, new, 1, row.draft_len, accepted_at))
    return StepResult(batch_id, replica_id, tuple(results), steps=1)


def _show(action: Action) -> str:
    match action:
        case Dispatch(batch):
            if batch.kind is BatchKind.PREFILL:
                rows = " ".join(_prefill_row(row) for row in batch.prefill)
                return f"dispatch {batch.replica_id} {batch.id} prefill {rows}"
            rows = " ".join(f"{r.sequence_id}[{r.length}]+{r.draft_len}" for r in batch.rows)
            head = f"dispatch {batch.replica_id} {batch.id} speculate"
            return f"{head} k={batch.draft_len} steps<={batch.steps} {rows}"
        case Emit(request_id, start, tokens):
            return f"emit {request_id} from {start}: {' '.join(map(str, tokens))}"
        case RecordFailure(request_id, record):
            counts = f"failures={record.failures} deaths={record.deaths} kills={record.kills}"
            until = f"{record.broke_at},{record.quarantined_until}"
            return f"record {request_id} {counts} rows<={record.rows_limit} until={until}"
        case Finish(request_id, reason, usage, message):
            figures = (
                f"prompt={usage.prompt_tokens} new={usage.completion_tokens} steps={usage.steps} "
                f"draft={usage.draft_tokens} accepted={usage.accepted_tokens} "
                f"recovered={usage.recovered} replicas={','.join(usage.replicas)}"
            )
            return f"finish {request_id} {reason} {figures} {message}".rstrip()
        case Reject(request_id, code, field, message, retry_after_s):
            later = f", retry after {retry_after_s:g} s" if retry_after_s else ""
            return f"reject {request_id} {code} {field}: {message}{later}"
        case Interrupt(replica_id, batch_id):
            return f"interrupt {replica_id} {batch_id}"
        case Release(replica_id, sequence_ids):
            return f"release {replica_id} {' '.join(sequence_ids)}"


def _prefill_row(row: PrefillRow) -> str:
    """a[9] is all of 9 tokens, a[9]<4 the first 4 KV positions of 8, a<8 the rest."""
    content = f"[{len(row.tokens)}]" if row.tokens else ""
    whole = content and row.until in (None, len(row.tokens) - 1)
    return f"{row.sequence_id}{content}" + ("" if whole else f"<{row.until}")


def main() -> None:
    for path in sorted(GOLDEN.glob("*.txt")):
        before = path.read_text()
        after = replay(before)
        path.write_text(after)
        print(f"{path.name}: {'same' if before == after else 'written anew'}")


if __name__ == "__main__":
    main()
