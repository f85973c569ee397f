"""Proves that the device benchmark runs without the cluster's packages and counts work rightly."""

from __future__ import annotations

import gc
import inspect
import json
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import replicas.replica as replica_module
from benchmarks import gpu
from benchmarks.ceilings import ModelWork, Rates, Work, measure_rates
from benchmarks.device_modes import ATTENTIONS, UNRECORDED, Outcome, one_line, unrecorded_steps
from benchmarks.device_report import Report
from benchmarks.device_runs import Agreement, Bench, Made, agreement, generate_work, outputs_made
from cluster.local_engine import LocalEngine
from replicas.cuda import graphs
from replicas.models.pair import Pair, PairRefused
from replicas.models.planted import planted_config
from replicas.models.shapes import parse_planted
from replicas.replica import Replica
from scheduler.config import SchedulerConfig
from scheduler.messages import Request
from tests.tiny_pairs import tiny_replica

ROOT = Path(__file__).parents[2]

# As on a machine with torch and transformers alone.
WITHOUT_CLUSTER = """
import runpy, sys

ABSENT = {"ray", "grpc", "fastapi", "starlette", "uvicorn", "typer", "protos"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_the_tiny_shape_runs_from_a_plain_checkout_and_says_what_it_should(tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    options = ["--shape", "tiny", "--device", "cpu", "--dtype", "bfloat16"]
    options += ["--batches", "1", "3", "--json", str(figures_file)]
    options += ["--attention", "gather", "varlen-256"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CLUSTER, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| deterministic | 3 | 3 |" in done.stdout
    assert "varlen-256: left out: NotPaged: varlen attention needs a GPU" in done.stdout
    written = json.loads(figures_file.read_text())
    assert written["complete"]
    states = {mode: outcome["state"] for mode, outcome in written["modes"].items()}
    assert states.pop("varlen-256") == "left out"
    assert list(states) == ["plain", "transformers", "gather", "deterministic"]
    assert set(states.values()) == {"measured"}
    assert written["modes"]["gather"]["attention"] == "gather"
    assert written["figures"]["gather over plain, batch 3, k = 3"] > 0
    assert written["follows"] == pytest.approx(0.7, abs=0.05)
    assert written["device"]["copy_gb_per_s"] > 0
    runs = {(run["mode"], run["batch"], run["draft_len"]): run for run in written["runs"]}
    assert set(runs) == {
        *(
            (mode, batch, k)
            for mode in ("plain", "gather", "deterministic")
            for batch in (1, 3)
            for k in (0, 3)
        ),
        ("transformers", 8, 0),
    }
    for (mode, batch, k), run in runs.items():
        assert run["tokens_per_s"] > 0
        outputs = run["outputs"]
        compared, across = outputs["compared"], outputs["compared_across"]
        if mode == "deterministic":
            assert outputs["identical"] == compared == max(batch, 2)
            assert outputs["identical_across"] == across == (3 if batch == 3 else 0)
        elif mode == "plain" and batch == 1:
            assert across == 0, "a row by itself both times"
        elif mode == "transformers":
            assert (compared, across) == (8, 8)
            assert min(run["bandwidth_ceiling"], run["matrix_ceiling"]) > 0
        if mode != "transformers":
            assert run["committed"] >= 1 + (k > 0) * 0.3
            # Not that the speed is below them: they were measured at another time.
            assert min(run["bandwidth_ceiling"], run["matrix_ceiling"]) > 0
            alone, plain = runs[mode, 1, k], runs["plain", batch, k]
            assert (run["bandwidth_ceiling"] > alone["bandwidth_ceiling"]) == (batch > 1)
            if k == 0:
                assert run["matrix_ceiling"] == pytest.approx(plain["matrix_ceiling"], rel=0.02)
            assert (run["over_plain"] == 1.0) == (k == 0)
    assert written["figures"]["deterministic: outputs compared with another batch size"] == 6
    assert written["figures"]["deterministic: share of them identical"] == 1
    assert {prefill["mode"] for prefill in written["prefill"]} == {
        "plain",
        "gather",
        "deterministic",
    }


SMALL = ["--shape", "tiny", "--device", "cpu", "--batches", "1", "--new-tokens", "4"]
SMALL += ["--alone", "2", "--attention", "gather"]


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    """Watches pairs and replicas while they are made."""
    found = Lives()
    for module in (gpu, replica_module):
        monkeypatch.setattr(module, "load_pair", found.loading(module.load_pair))
    monkeypatch.setattr(Replica, "__init__", found.making(Replica.__init__))
    return found


class Lives:
    """Which models and replicas were made; none may be while one before it is alive."""

    def __init__(self) -> None:
        self.targets: list[weakref.ref[Any]] = []
        self.replicas: list[weakref.ref[Any]] = []

    def loading(self, load: Callable[..., Pair]) -> Callable[..., Pair]:
        def loaded(*args: Any) -> Pair:
            assert not any(one() for one in (*self.targets, *self.replicas))
            pair = load(*args)
            self.targets.append(weakref.ref(pair.target))
            return pair

        return loaded

    def making(self, make: Callable[..., None]) -> Callable[..., None]:
        def made(replica: Replica, *args: Any) -> None:
            assert not any(one() for one in self.replicas)
            self.replicas.append(weakref.ref(replica))
            make(replica, *args)

        return made


def failing(
    monkeypatch: pytest.MonkeyPatch, mode: str, error: BaseException, round_: int = 1
) -> None:
    """In this round, the first being 0, after the runs without drafting. The error is raised anew,
    because the one that is given outlives the mode, and its traceback what it has seen."""
    lockstep, seen = Bench.lockstep, []

    def run(bench: Bench, name: str, replica: Replica, batch: int, draft_len: int) -> None:
        if name == mode and draft_len > 0:
            seen.append(batch)
            if len(seen) == round_ + 1:
                raise type(error)(*error.args)
        lockstep(bench, name, replica, batch, draft_len)

    monkeypatch.setattr(Bench, "lockstep", run)


def test_a_mode_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: Lives, capsys: pytest.CaptureFixture
) -> None:
    figures_file = tmp_path / "new" / "figures.json"
    failing(monkeypatch, "gather", torch.OutOfMemoryError("out of memory:\n  a | b"))
    states = []
    write = Report.write

    def noted(report: Report) -> None:
        write(report)
        written = json.loads(figures_file.read_text())
        modes = "".join(outcome["state"][0] for outcome in written["modes"].values())
        states.append((modes, written["complete"], {run["mode"] for run in written["runs"]}))

    monkeypatch.setattr(Report, "write", noted)
    assert gpu.main([*SMALL, "--json", str(figures_file)]) == 1
    usual = {"plain", "transformers"}
    assert states == [  # waiting, measured, failed: plain, transformers, gather, deterministic
        ("wwww", False, set()),
        ("wmww", False, set()),  # after the round that warms up
        ("wmww", False, usual),
        ("mmww", False, usual),
        ("mmfw", False, {*usual, "gather"}),
        ("mmfm", True, {*usual, "gather", "deterministic"}),
    ]
    assert list(figures_file.parent.iterdir()) == [figures_file]
    written = json.loads(figures_file.read_text())
    assert written["modes"]["gather"]["message"] == "OutOfMemoryError: out of memory: a | b"
    assert written["figures"]["deterministic over plain, batch 1, k = 0"] > 0
    # What was measured before it failed is kept.
    runs = {(run["mode"], run["draft_len"]) for run in written["runs"]}
    assert {(mode, k) for mode in ("plain", "deterministic") for k in (0, 3)} <= runs
    assert ("gather", 0) in runs
    assert ("gather", 3) not in runs
    assert "| gather | failed | gather | 0 |  | OutOfMemoryError" in capsys.readouterr().out
    assert (len(lives.targets), len(lives.replicas)) == (2, 3)
    gc.collect()
    assert not any(one() for one in (*lives.targets, *lives.replicas))


def test_what_runs_beside_the_usual_mode_fails_by_itself_and_a_warm_up_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: Lives
) -> None:
    figures_file = tmp_path / "figures.json"
    failing(monkeypatch, "gather", PairRefused("no"), round_=0)

    def generate(bench: Bench, pair: Pair) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Bench, "generate", generate)
    assert gpu.main([*SMALL, "--no-deterministic", "--json", str(figures_file)]) == 1
    written = json.loads(figures_file.read_text())
    messages = {mode: outcome["message"] for mode, outcome in written["modes"].items()}
    assert messages == {
        "plain": "",
        "transformers": "RuntimeError: no kernel",
        "gather": "PairRefused: no",
    }
    assert {run["mode"] for run in written["runs"]} == {"plain"}
    assert len(lives.targets) == 1


def test_a_run_that_is_cut_off_leaves_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures_file = tmp_path / "figures.json"
    failing(monkeypatch, "gather", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*SMALL, "--json", str(figures_file)])
    written = json.loads(figures_file.read_text())
    assert not written["complete"]
    states = {mode: outcome["state"] for mode, outcome in written["modes"].items()}
    assert (states["plain"], states["gather"], states["deterministic"]) == (
        "measured",
        "waiting",
        "waiting",
    )
    assert written["figures"]["speculation (k = 3) over k = 0, batch 1"] > 0


def test_what_nobody_named_may_fail() -> None:
    modes = {"plain": Outcome("measured"), "flex": Outcome("failed"), "gather": Outcome("left out")}
    assert gpu.exit_status(modes, ATTENTIONS) == 0
    assert gpu.exit_status(modes, ()) == 1
    assert gpu.exit_status({**modes, "plain": Outcome("failed")}, ATTENTIONS) == 1


def test_steps_that_run_unrecorded_are_told_by_the_warning_that_replicas_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert f'"{UNRECORDED}: ' in inspect.getsource(graphs)
    found: list[str] = []
    with unrecorded_steps(found):
        for kind in (1, 2, 2):
            warnings.warn(f"{UNRECORDED}: {kind}:\n no memory", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert found == [f"{UNRECORDED}: 1: no memory", f"{UNRECORDED}: 2: no memory"]
    assert "something else" in capsys.readouterr().err
    assert len(one_line(ValueError("x" * 5000))) == 300


def made(rows: int, *outputs: int) -> list[Made]:
    return [Made([output], rows) for output in outputs]


def test_outputs_are_compared_with_those_alone_and_then_with_the_smallest_other_run() -> None:
    outputs = {
        ("a", 1, 0): made(1, 7, 8),
        ("a", 4, 0): made(4, 7, 8, 9, 5),
        ("a", 4, 3): made(4, 7, 1, 9, 6),
        ("b", 4, 0): made(4, 0, 0, 0, 0),
        ("transformers", 8, 0): made(8, 7, 2, 9, 5),
    }
    alone = {"a": made(1, 7, 8, 9)}
    # The fourth was not alone: it stands beside a run of the same batch size.
    assert agreement(("a", 4, 3), outputs, alone) == Agreement(2, 4, 2, 3)
    # Without drafting only the same run has the fourth.
    assert agreement(("a", 4, 0), outputs, alone) == Agreement(3, 3, 3, 3)
    assert agreement(("a", 1, 0), outputs, alone) == Agreement(2, 2, 0, 0)
    assert agreement(("a", 4, 3), outputs, {}) == Agreement(2, 4, 1, 2)
    assert agreement(("b", 4, 0), outputs, alone) == Agreement(0, 0, 0, 0)
    assert agreement(("transformers", 8, 0), outputs, alone) == Agreement(3, 4, 3, 4)


def test_an_output_is_of_the_largest_group_that_it_was_in() -> None:
    """Which may be smaller than the run's batch size: those count that were computed together."""
    engine = LocalEngine(tiny_replica("llama"), SchedulerConfig(rows_max=4, draft_len=0))
    requests = [Request(str(n), tuple(range(3, 9)), new) for n, new in enumerate((4, 9, 9))]
    engine.generate(requests)
    assert [each.rows for each in outputs_made(engine, requests)] == [3, 3, 3]
    assert [len(each.tokens) for each in outputs_made(engine, requests)] == [4, 9, 9]
    alone = LocalEngine(tiny_replica("llama"), SchedulerConfig(rows_max=4, draft_len=0))
    alone.generate(requests[:1])
    assert outputs_made(alone, requests[:1])[0].rows == 1


def test_generate_reads_its_weights_once_per_new_token() -> None:
    """The prompts' pass yields the first; no row reads further than its own content."""
    work = work_of("qwen3-0.6b")
    prompts, new = [10, 30], 4
    done = generate_work(work, prompts, new)
    cached = (11 + 12 + 13) + (31 + 32 + 33)
    assert done.bytes == 4 * work.weight_bytes + (cached + 40) * work.kv_bytes
    first = generate_work(work, prompts, 1)
    assert done.operations == pytest.approx(
        first.operations + 6 * 2 * work.weights + cached * work.attention_operations
    )
    assert first.bytes == work.weight_bytes + 40 * work.kv_bytes
    fill, further = work.prefill(prompts), work.weights - work.prefill_weights
    assert first.bytes - fill.bytes == 2 * further
    # Only the last token of each prompt goes through what its keys and values do not take.
    assert first.operations == pytest.approx(
        fill.operations + 2 * 2 * further + 40 * work.attention_operations / 28
    )


@pytest.mark.parametrize("shape", ["qwen3-8b", "qwen3-0.6b", "glm4-9b", "vicuna-68m"])
def test_filling_in_a_prompt_takes_what_its_keys_and_values_depend_on(shape: str) -> None:
    with torch.device("meta"):
        config = planted_config(parse_planted(f"planted:{shape}"))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    last = f"layers.{config.num_hidden_layers - 1}."
    needed = sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if weight.dim() > 1
        and not name.startswith("lm_head")
        and "embed_tokens" not in name
        and (last not in name or "k_proj" in name or "v_proj" in name)
    )
    work = ModelWork.of(model)
    assert work.prefill_weights == pytest.approx(needed, rel=1e-3)
    fill = work.prefill([100, 40])
    assert fill.bytes == 2 * work.prefill_weights + 140 * work.kv_bytes
    layers = config.num_hidden_layers
    attention = (100**2 + 40**2) / 2 * work.attention_operations * (layers - 1) / layers
    assert fill.operations == pytest.approx(2 * 140 * work.prefill_weights + attention)


def work_of(shape: str) -> ModelWork:
    with torch.device("meta"):
        config = planted_config(parse_planted(f"planted:{shape}"))
        return ModelWork.of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def test_the_work_of_qwen3_8b_is_what_its_sizes_say() -> None:
    work = work_of("qwen3-8b")
    layer = 4096 * 128 * (32 + 8 + 8) + 32 * 128 * 4096 + 3 * 4096 * 12_288
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert work.weights == 36 * layer + norms + 4096 * 151_936
    assert work.weight_bytes == 2 * work.weights
    assert work.kv_bytes == 36 * 2 * 8 * 128 * 2
    one = work.decode(passes=1, tokens=1, positions=100)
    assert one.bytes == work.weight_bytes + 100 * work.kv_bytes
    assert one.operations == 2 * work.weights + 100 * 36 * 4 * 32 * 128


def test_a_batch_shares_the_weights_and_a_ceiling_is_work_over_rate() -> None:
    work = work_of("qwen3-0.6b")
    rates = Rates(bytes_per_s=1e12, operations_per_s=1e14)
    one, eight = work.decode(10, 10, 0), work.decode(10, 80, 0)
    assert eight.bandwidth_s(rates) == one.bandwidth_s(rates) == 10 * work.weight_bytes / 1e12
    assert eight.matrix_s(rates) == 8 * one.matrix_s(rates)
    assert one + eight == Work(one.bytes + eight.bytes, one.operations + eight.operations)
    # A prefill needs the output matrix for no more than one position.
    assert work.prefill([100]).operations < work.decode(1, 100, 5000).operations


def test_rates_are_measured_on_the_device() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert 1e8 < rates.bytes_per_s < 1e13
    assert 1e8 < rates.operations_per_s < 1e15
