"""Proves: lm-eval measures a served Lockstep through `local-completions` as it measures the same
target by its own `hf` backend: the accuracy of each task, the texts and whether a choice is the
greedy one are equal, and each loglikelihood is within 1e-3. Through `local-chat-completions` the
texts are those of that backend with the target's chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import NAME, Run, Served

pytestmark = [pytest.mark.ray, pytest.mark.clients]

ROWS = [
    ("The if statement is used for conditional", [" execution", " water", " dictionary"], 0),
    ("The for statement is used to iterate over the", [" sky", " elements", " exception"], 1),
    ("The while statement is used for repeated", [" execution", " names", " letters"], 0),
    ("The try statement specifies exception", [" tables", " handlers", " banks"], 1),
    ("A function definition defines a user-defined", [" module", " river", " function"], 2),
    ("A class definition defines a class", [" object", " file", " number"], 0),
    ("The del statement is used to", [" return", " remove", " import"], 1),
    ("The pass statement does", [" nothing", " everything", " raise"], 0),
]
GENERATE = """\
task: served_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n\\n", "."], max_gen_toks: 24, do_sample: false, temperature: 0}}
metric_list:
  - metric: exact_match
"""
CHOOSE = """\
task: served_choose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
TASKS = {"served_generate": ("exact_match,none", GENERATE), "served_choose": ("acc,none", CHOOSE)}


def evaluated(out: Path, task: str) -> tuple[float, list[Any]]:
    """The task's figure, and the answers of each row in the order of the rows."""
    [results] = out.rglob("results_*.json")
    figure = json.loads(results.read_text())["results"][task][TASKS[task][0]]
    [samples] = out.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    assert len(rows) == len(ROWS)
    return figure, [row["filtered_resps"] for row in rows]


@pytest.fixture
def measured(served: Served, run: Run, tmp_path: Path) -> Callable[..., None]:
    """Runs the tasks through the server and by lm-eval's own backend."""
    data = tmp_path / "rows.jsonl"
    lines = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in ROWS]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for task, (_, form) in TASKS.items():
        (folder / f"{task}.yaml").write_text(form.format(data=data))

    def measured(model: str, path: str, tasks: Iterable[str], *more: str) -> None:
        through = f"model={NAME},base_url={served.http}/v1/{path},num_concurrent=4,max_retries=1"
        through += f",tokenizer={served.directory}" * (path == "completions")
        for by, arguments, out in (
            (model, through, "served"),
            ("hf", f"pretrained={served.directory},dtype=float32", "own"),
        ):
            run(
                *("lm_eval", "--model", by, "--model_args", arguments, "--device", "cpu"),
                *("--tasks", ",".join(tasks), "--include_path", folder, *more),
                *("--output_path", tmp_path / out, "--log_samples"),
                offline=True,
            )

    return measured


def test_lm_eval_gets_the_texts_of_its_own_backend_in_chat(
    measured: Callable[..., None], tmp_path: Path
) -> None:
    measured(
        "local-chat-completions", "chat/completions", ["served_generate"], "--apply_chat_template"
    )
    both = [evaluated(tmp_path / out, "served_generate") for out in ("served", "own")]
    assert both[0] == both[1]
    assert any(text for [text] in both[0][1])


def test_lm_eval_measures_the_same_as_by_its_own_backend(
    measured: Callable[..., None], tmp_path: Path
) -> None:
    measured("local-completions", "completions", TASKS)
    (figure, texts), (own_figure, own_texts) = (
        evaluated(tmp_path / out, "served_generate") for out in ("served", "own")
    )
    assert figure == own_figure
    assert texts == own_texts
    assert any(text for [text] in texts)
    (figure, chosen), (own_figure, own_chosen) = (
        evaluated(tmp_path / out, "served_choose") for out in ("served", "own")
    )
    assert figure == own_figure
    for row, own_row in zip(chosen, own_chosen, strict=True):
        for (value, greedy), (own_value, own_greedy) in zip(row, own_row, strict=True):
            assert greedy == own_greedy
            assert float(value) == pytest.approx(float(own_value), abs=1e-3)
