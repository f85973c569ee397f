"""Proves: the model in this process writes what transformers writes, for texts, tokens and
conversations, with every setting of a request; what is wrong is named with its prompt, and what
ends early leaves nothing behind.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, AutoTokenizer

import lockstep
from cluster.config import ConfigError
from lockstep import LLM, PromptFailed, SamplingParams
from replicas.config import ReplicaConfig
from replicas.demo import TARGET_DIR
from replicas.replica import Replica
from scheduler.errors import InvalidRequest
from scheduler.messages import Batch, StepResult
from tests.reference import plain_greedy

TINY: Any = {
    "device": "cpu",
    "torch_threads": 1,
    "num_gpu_blocks_override": 512,
    "calibrate": False,
}
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PROMPTS = ["def add(a, b):", "The list", "import os\n"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", **TINY)


def test_completions_are_those_of_transformers(llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR).eval()
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    texts = llm.generate(PROMPTS, params, progress=False)
    for text in texts:
        assert text.token_ids == plain_greedy(model, text.prompt_token_ids, 24)
        assert text.finish_reason == "length"
    again = llm.generate([text.prompt_token_ids for text in texts], params, progress=False)
    assert [answer.text for answer in again] == [text.text for text in texts]
    stop = texts[0].text[5:8]
    [cut] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, stop=stop), progress=False)
    assert (cut.text, cut.finish_reason) == (texts[0].text.partition(stop)[0], "stop")
    assert cut.usage.completion_tokens == len(cut.token_ids)


def test_each_prompt_has_its_own_settings(llm: LLM) -> None:
    schema = json.dumps(
        {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    )
    every = [
        SamplingParams(max_tokens=5, temperature=1, seed=1, logprobs=2),
        SamplingParams(json_schema=schema.replace("}}", '}}, "additionalProperties": false')),
        SamplingParams(choice=["yes", "no"], prompt_logprobs=0),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
    ]
    first, second, third, scored = llm.generate([*PROMPTS, PROMPTS[2]], every, progress=False)
    assert len(first.logprobs) == len(first.token_ids)
    assert json.loads(second.text)["a"] in (1, 2)
    assert third.text in ("yes", "no")
    assert len(third.prompt_logprobs) == len(third.prompt_token_ids) - 1
    assert scored.prompt_logprobs == third.prompt_logprobs
    assert (scored.text, scored.token_ids, scored.finish_reason) == ("", [], "length")


def test_conversations_are_written_as_the_prompts_of_their_template(
    llm: LLM, tmp_path: Path
) -> None:
    """Several at once with settings of their own, and one alone; however they are drafted."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    talks = [
        [{"role": "user", "content": "def add(a, b):"}],
        [
            {"role": "system", "content": "The list"},
            {"role": "user", "content": "import os"},
            {"role": "assistant", "content": "import sys"},
            {"role": "user", "content": "more"},
        ],
    ]
    every = [
        SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1, seed=5),
    ]
    # By measured times a busy machine might draft nothing.
    suffix = {"method": "suffix", "adaptive": False, "num_speculative_tokens": 4}
    model = LLM("tiny", speculative_config=suffix, chat_template=str(template), **TINY)
    answers = model.chat(talks, every, progress=False)
    encode = AutoTokenizer.from_pretrained(TARGET_DIR).apply_chat_template
    prompts = [
        encode(talk, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False)
        for talk in talks
    ]
    assert [answer.prompt_token_ids for answer in answers] == prompts
    plain = llm.generate(prompts, every, progress=False)
    for answer, other in zip(answers, plain, strict=True):
        assert replace(answer, usage=other.usage) == other
    assert sum(answer.usage.accepted_tokens for answer in answers) > 0
    [alone] = model.chat(talks[1], every[1], progress=False)
    assert alone.token_ids == answers[1].token_ids


def test_a_template_and_a_structure_are_bounded_here_too(llm: LLM, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content * 10 ** messages[0].content | length }}")
    model = LLM("tiny", chat_template=str(template), **TINY)
    said = [{"role": "user", "content": "x" * 11}]
    with pytest.raises(InvalidRequest, match=r"^prompt 0: messages: .* takes more than 512 MB"):
        model.chat(said, progress=False)
    [answer] = model.chat([{"role": "user", "content": "x"}], SamplingParams(choice=["yes"]))
    assert answer.text == "yes"
    circular = json.dumps({"$ref": "#"})
    with pytest.raises(InvalidRequest, match=r"^prompt 0: json_schema: it allows no"):
        llm.generate("x", SamplingParams(json_schema=circular), progress=False)


def test_with_a_seed_of_its_own_a_model_samples_the_same_again() -> None:
    """Every prompt with another one."""
    params = SamplingParams(max_tokens=12, temperature=1)
    models = [LLM("tiny", seed=seed, **TINY) for seed in (2, 2, 3)]
    answers = [model.generate(PROMPTS[:1] * 2, params, progress=False) for model in models]
    texts = [[completion.text for completion in each] for each in answers]
    assert texts[0] == texts[1]
    assert texts[0][1] == texts[2][0] != texts[0][0]


def test_what_is_wrong_is_named(llm: LLM) -> None:
    ask, chat, two, turn = llm.generate, llm.chat, ["x", "y"], {"role": "user", "content": "x"}
    plain, of, no_text = SamplingParams(), SamplingParams, "is no text in UTF-8"
    rows: list[tuple[Any, Any, Any, str]] = [
        (ask, two, [plain, of(temperature=-1)], "prompt 1: temperature"),
        (ask, two, [plain, of(regex="a", choice=["b"])], "prompt 1: choice: regex is given"),
        (ask, PROMPTS, [plain], "sampling_params: 1 for 3"),
        (chat, [turn], None, "prompt 0: messages: .*no chat template; send prompt"),
        (chat, [turn], of(max_tokens=0), "prompt 0: max_tokens: must be at least 1"),
        (chat, [{"content": "x"}], None, "prompt 0: messages: a role"),
        (ask, ["x", "\udc80"], None, f"prompt 1: {no_text}"),
        (ask, "x", of(bad_words="\udc80"), f"prompt 0: {no_text}"),
        *((ask, [bad], None, "prompt 0: must be") for bad in (5, [1.5], ["a"], b"a", {1: 2})),
        *((ask, "x", bad, "sampling_params: must be") for bad in ({"max_tokens": 3}, [None])),
        *((chat, bad, None, "prompt 0: must be a list") for bad in ("hello", ["hello"], [1])),
    ]
    for call, given, params, said in rows:
        with pytest.raises(InvalidRequest, match=f"^{said}"):
            call(given, params, progress=False)
    with pytest.raises(ValidationError, match="max_tokens"):
        SamplingParams(max_tokens=4.5)  # type: ignore[arg-type]
    assert not hasattr(lockstep, "nothing")


def test_what_ends_early_leaves_no_blocks_to_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stop string or by an interrupt, in a cache that holds one row."""
    model = LLM("tiny", **TINY | {"num_gpu_blocks_override": 4, "context_len": 64})
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    [whole] = model.generate(PROMPTS[0], params, progress=False)
    stop = replace(params, stop=[whole.text[5:8]])
    for _ in range(3):
        [cut] = model.generate(PROMPTS[0], stop, progress=False)
        assert cut.finish_reason == "stop"

    def interrupt(*_given: object, **_named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cluster.local.llm.Bars.note", interrupt)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                model.generate(PROMPTS[:2], params)
    [again] = model.generate(PROMPTS[0], params, progress=False)
    assert again.token_ids == whole.token_ids


def test_a_prompt_that_fails_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    """Its last token stands for activations that leave float16's range."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    bad = tokenizer.encode("import §")
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = Parameter(model.lm_head.weight.detach().clone())
    model.get_input_embeddings().weight.data[bad[-1]] = float("inf")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    broken = LLM(str(tmp_path), speculative_config={"method": "none"}, dtype="float16", **TINY)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with pytest.raises(
        PromptFailed, match=r"^prompt 1: the logits after 4 tokens are not finite"
    ) as caught:
        broken.generate([PROMPTS[0], bad, PROMPTS[1]], params, progress=False)
    first, failed, last = caught.value.completions
    assert failed is None
    whole = broken.generate(PROMPTS[:2], params, progress=False)
    assert [first.token_ids, last.token_ids] == [completion.token_ids for completion in whole]


def test_what_was_written_before_the_replica_broke_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be released there. Its memory was planned for so many rows."""

    def load(config: ReplicaConfig) -> Any:
        replica = Replica.load(config)
        assert config.plan_rows == 1
        step = replica.step

        def breaks(batch: Batch, *rest: Any) -> StepResult:
            if batch.id > 3:
                replica.broken = RuntimeError("rank 1 has ended")
                monkeypatch.setattr(replica, "release", pytest.fail)
                raise replica.broken
            return step(batch, *rest)

        monkeypatch.setattr(replica, "step", breaks)
        return replica

    monkeypatch.setattr("cluster.local.llm.load_replica", load)
    model = LLM("tiny", rows_max=1, speculative_config={"method": "none"}, **TINY)
    short, long = (SamplingParams(max_tokens=many, ignore_eos=True) for many in (1, 99))
    with pytest.raises(PromptFailed, match=r"^prompt 1: rank 1 has ended") as caught:
        model.generate(PROMPTS[:2], [short, long])
    written, failed = caught.value.completions
    assert (len(written.token_ids), failed) == (1, None)


def test_settings_have_the_names_of_other_servers_too() -> None:
    settings: Any = {"max_model_len": 64, "gpu_memory_utilization": 0.5, "tensor_parallel_size": 1}
    model = LLM("tiny", **TINY, **settings)
    said = "the maximum context length is 64 tokens, 72 were asked for"
    with pytest.raises(InvalidRequest, match=said):
        model.generate(PROMPTS[:1], SamplingParams(max_tokens=65), progress=False)
    with pytest.raises(ConfigError, match="max_model_len: also given as context_len"):
        LLM("tiny", context_len=64, **settings)
    with pytest.raises(ValueError, match="revision: 'tiny@v1'"):
        LLM("tiny", revision="v1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "int8"}, "dtype: must be"),
        ({"max_model_len": 1}, "max_model_len: must be at least 2"),
        ({"max_model_len": 1 << 20}, "max_model_len: 1048576 is over the target's own limit"),
        ({"context_len": 1 << 20}, "context_len: 1048576 is over the target's own limit"),
        ({"rows_max": 0}, "rows_max: must be"),
        ({"seed": -1}, "seed: must be"),
        ({"model": "/nowhere"}, "model: '/nowhere'"),
        ({"draft": "/nowhere"}, "draft: unknown name; use speculative_config"),
        ({"speculative_config": {"method": "magic"}}, "speculative_config.method: must be"),
        ({"speculative_config": {"method": "eagle3"}}, "speculative_config: model: method eagle3"),
        (
            {"speculative_config": {"method": "eagle3", "model": "/nowhere"}},
            "speculative_config.model: '/nowhere'",
        ),
        (
            {"speculative_config": {"method": "suffix", "num_speculative_tokens": 33}},
            "speculative_config.num_speculative_tokens: must be at most 32",
        ),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "tensor_parallel_size: device cuda:1"),
        ({"target": "tiny"}, "target: is given as model"),
        ({"timeout_s": 5}, "timeout_s: unknown name"),
        ({"chat_template": "/nowhere"}, "chat_template: "),
    ],
)
def test_an_error_names_what_its_caller_can_give(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, OSError)) as refused:
        LLM(**{"model": "tiny", **TINY, **given})
    assert str(refused.value).startswith(said)


def test_drafts_go_as_far_as_is_said() -> None:
    """Also further than the scheduler of a cluster lets them by default."""
    drafts = {"method": "suffix", "num_speculative_tokens": 16, "adaptive": False}
    model = LLM("tiny", speculative_config=drafts, **TINY)
    [text] = model.generate("a b " * 20, SamplingParams(max_tokens=64), progress=False)
    assert len(text.usage.accepted_at) == 16
