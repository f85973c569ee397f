"""The one table of parameters: every name that clients of OpenAI, vLLM and SGLang send.

A parameter is supported; or it changes no output and is ignored; or it would change the output and
is refused, except with neutral values. `check` reads the table, the page
docs/parameters.md is made of it, and the tests go through it. A name within an object stands behind
the object's place, as in `messages.refusal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    SUPPORTED = "supported"
    WITHOUT_EFFECT = "ignored, changes no output"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Parameter:
    kind: Kind
    about: str
    neutral: tuple[Any, ...] = ()
    """Of a refused one: values that are taken, besides null, because they change nothing."""


def _supported(about: str) -> Parameter:
    return Parameter(Kind.SUPPORTED, about)


def _free(about: str) -> Parameter:
    return Parameter(Kind.WITHOUT_EFFECT, about)


def _refused(about: str, *neutral: Any) -> Parameter:
    return Parameter(Kind.REFUSED, about, neutral)


TOPS = ("responses.", "anthropic.")
"""Places of whole bodies that have names of their own, besides those without a place."""

PARAMETERS: Mapping[str, Parameter] = {
    # ---------------------------------------------------------------- what is asked
    "model": _supported("the served model's name; may be left out"),
    "messages": _supported("the conversation, oldest turn first; texts only"),
    "messages.role": _supported("as the chat template names it"),
    "messages.content": _supported("a text, or a list of parts of type text"),
    "messages.name": _supported("for the chat template"),
    "messages.tool_calls": _supported("the tool calls of this turn"),
    "messages.tool_call_id": _supported("the call that this result belongs to"),
    "messages.annotations": _free("part of other servers' answers"),
    "messages.reasoning": _supported("the turn's reasoning, for the chat template"),
    "messages.reasoning_content": _supported("another name of `reasoning`"),
    "messages.refusal": _free("part of answers"),
    "messages.cache_control": _free("prefixes are always cached"),
    "messages.audio": _refused("audio is not supported"),
    "messages.function_call": _supported("the tool call of this turn (older name)"),
    "messages.content.cache_control": _free("prefixes are always cached"),
    "messages.content.annotations": _free("part of other servers' answers"),
    "messages.tool_calls.cache_control": _free("prefixes are always cached"),
    "prompt": _supported("a text, token ids, or a list of either"),
    "tools": _supported("functions that the target may call"),
    "tools.type": _supported("`function`"),
    "tools.function": _supported("`name`, `description`, `parameters`, `strict`"),
    "tools.cache_control": _free("prefixes are always cached"),
    "tools.defer_loading": _free("the template gets all tools"),
    "tools.function.cache_control": _free("prefixes are always cached"),
    "tools.function.defer_loading": _free("the template gets all tools"),
    "tool_choice": _supported("`none`, `auto`, `required`, one function, or allowed tools"),
    "parallel_tool_calls": _supported("whether the answer may have several calls"),
    "functions": _supported("older name of `tools`"),
    "function_call": _supported("older name of `tool_choice`"),
    "chat_template_kwargs": _supported("further variables of the chat template"),
    "chat_template": _supported("default: the target's own; needs `frontend.request_templates`"),
    "documents": _supported("texts for the chat template"),
    "suffix": _refused("filling in text is not supported", ""),
    "prompt_embeds": _refused("send a text or token ids", []),
    "input_ids": _supported("the prompt's tokens; no template is rendered"),
    "prediction": _free("drafters need no hint"),
    "audio": _free("options of audio, which is refused"),
    "modalities": _refused("answers are text", ["text"]),
    "web_search_options": _refused("the server does not search the web"),
    "moderation": _refused("the server does not moderate"),
    "media_io_kwargs": _free("options of images and audio, which are refused"),
    "mm_processor_kwargs": _free("options of images and audio, which are refused"),
    "mm_payload": _free("options of images and audio, which are refused"),
    "return_mm_kwargs": _free("options of images and audio, which are refused"),
    "images_config": _free("options of images and audio, which are refused"),
    "video_config": _free("options of images and audio, which are refused"),
    "max_dynamic_patch": _free("options of images and audio, which are refused"),
    "min_dynamic_patch": _free("options of images and audio, which are refused"),
    "use_audio_in_video": _free("options of images and audio, which are refused"),
    # ---------------------------------------------------------------- how many, how long
    "n": _supported("number of choices; choice j has the seed `seed` + j"),
    "best_of": _refused("send `n` and choose among the answers", 0, 1),
    "max_tokens": _supported(
        "maximum of new tokens; default: completions 16, chat the rest of the context"
    ),
    "max_completion_tokens": _supported("the same; takes precedence over `max_tokens`"),
    "n_predict": _refused("send `max_tokens`"),
    "min_tokens": _supported(
        "minimum of new tokens before a stop token or stop string may end the answer"
    ),
    "stop": _supported("up to 64 texts; the answer ends before the first match"),
    "stop_token_ids": _supported("tokens that end the answer; their text is left out"),
    "stop_regex": _refused("send `stop`"),
    "ignore_eos": _supported("continue after the target's end-of-text tokens"),
    "include_stop_str_in_output": _supported(
        "the answer includes the stop string or stop token that ends it"
    ),
    "no_stop_trim": _refused("the answer ends before the stop string", False),
    "truncate_prompt_tokens": _supported(
        "maximum of prompt tokens, others are cut off; -1: as many as fit"
    ),
    "truncation_side": _supported("`left` keeps the last tokens, `right` the first"),
    "add_special_tokens": _supported("whether the prompt gets the target's special tokens"),
    "committed_token_ids": _supported("tokens of the answer that the client has already"),
    # ---------------------------------------------------------------- how a token is chosen
    "temperature": _supported("default 1; 0 is greedy"),
    "top_p": _supported("in (0, 1]"),
    "top_k": _supported("0 or -1: no limit"),
    "min_p": _supported("in [0, 1]"),
    "seed": _supported("the same request and seed give the same answer; may be negative"),
    "logit_bias": _supported("by token id, in [-100, 100]"),
    "repetition_penalty": _supported("above 0"),
    "frequency_penalty": _supported("in [-2, 2]"),
    "presence_penalty": _supported("in [-2, 2]"),
    "bad_words": _supported("texts that must not appear"),
    "allowed_token_ids": _supported("only these tokens are chosen"),
    "use_beam_search": _refused("beam search is not supported", False),
    "length_penalty": _refused("beam search is not supported", 1),
    "early_stopping": _refused("beam search is not supported", False),
    "watermarking": _refused("watermarks are not supported", False),
    "watermark": _refused("watermarks are not supported", {}),
    "repetition_detection": _refused("repetition is not detected"),
    "custom_logit_processor": _refused("the server runs no code of clients"),
    "custom_params": _refused("the server runs no code of clients", {}),
    "vllm_xargs": _refused("the server runs no code of clients", {}),
    "typical_p": _refused("send `top_p` or `min_p`", 1),
    "tfs_z": _refused("send `top_p` or `min_p`", 1),
    "top_a": _refused("send `top_p` or `min_p`", 0),
    "mirostat": _refused("send `temperature`", 0),
    "dynatemp_range": _refused("send `temperature`", 0),
    "xtc_probability": _refused("send `min_p`", 0),
    "dry_multiplier": _refused("send `repetition_penalty`", 0),
    "repeat_penalty": _refused("send `repetition_penalty`", 1),
    # ---------------------------------------------------------------- what the text must be
    "response_format": _supported("`text`, `json_object`, `json_schema`, `structural_tag`"),
    "structured_outputs": _supported(
        "`json(_object)`, `regex`, `choice`, `grammar`, `structural_tag`"
    ),
    "guided_json": _supported("`json` of `structured_outputs`"),
    "guided_regex": _supported("`regex` of `structured_outputs`"),
    "guided_choice": _supported("`choice` of `structured_outputs`"),
    "guided_grammar": _supported("`grammar` of `structured_outputs`"),
    "guided_json_object": _supported("`json_object` of `structured_outputs`"),
    "guided_whitespace_pattern": _refused("whitespace in documents is fixed"),
    "guided_decoding_backend": _free("the server has one backend"),
    "regex": _supported("`regex` of `structured_outputs`"),
    "ebnf": _supported("`grammar` of `structured_outputs`"),
    "json_schema": _supported("`json` of `structured_outputs`"),
    "structured_outputs.disable_any_whitespace": _free("whitespace in documents is fixed"),
    "structured_outputs.disable_additional_properties": _refused("write it in the schema", False),
    "structured_outputs.whitespace_pattern": _refused("whitespace in documents is fixed"),
    # ---------------------------------------------------------------- reasoning
    "reasoning_effort": _supported("for the chat template; `none`: no reasoning"),
    "enable_thinking": _supported("for the chat template"),
    "include_reasoning": _supported("whether the answer includes its reasoning"),
    "separate_reasoning": _supported("false: reasoning is part of the text; not with tools"),
    "stream_reasoning": _supported("false: a stream gives reasoning in one piece, at its end"),
    "thinking": _refused("send `chat_template_kwargs`"),
    "thinking_token_budget": _supported("maximum of reasoning tokens; -1: no limit"),
    # ---------------------------------------------------------------- what is told
    "stream": _supported("events while the text is generated"),
    "stream_options": _supported("`include_usage`, and `continuous_usage_stats` with it"),
    "stream_options.include_obfuscation": _free("events have no padding"),
    "stream_interval": _free("`frontend.coalesce_ms` sets the interval"),
    "logprobs": _supported("log-probabilities of the new tokens; -1: of all tokens"),
    "top_logprobs": _supported("likeliest tokens at each position; -1: all tokens"),
    "prompt_logprobs": _supported("log-probabilities of the prompt's tokens; -1: of all tokens"),
    "echo": _supported("the text begins with the prompt, or with the last turn of the assistant"),
    "return_token_ids": _supported("token ids of the prompt and of the answer"),
    "speculative_decoding_stats": _supported(
        "counts and positions of proposed and accepted draft tokens"
    ),
    "skip_special_tokens": _supported("false: special tokens appear in the text"),
    "spaces_between_special_tokens": _refused("special tokens are left out of the text", True),
    "return_tokens_as_token_ids": _supported("log-probabilities name a token `token_id:ID`"),
    "logprob_token_ids": _supported("log-probabilities of these tokens instead of the likeliest"),
    "add_generation_prompt": _supported("false: the prompt does not begin the next turn"),
    "continue_final_message": _supported("the answer continues the last turn"),
    "return_prompt_text": _refused("send `echo`", False),
    "return_weight_versions": _refused("weights never change", False),
    "return_hidden_states": _refused("answers are text", False),
    "return_routed_experts": _refused("answers are text", False),
    "return_sampling_mask": _refused("answers are text", False),
    "sampling_logprobs_mode": _refused("log-probabilities are the target's own"),
    "return_prompt_token_ids": _refused("send `return_token_ids`", False),
    "return_meta_info": _refused("send `return_token_ids`", False),
    "return_input_ids_in_sglext": _refused("send `return_token_ids`", False),
    "return_output_ids_in_sglext": _refused("send `return_token_ids`", False),
    "return_flat_raw_output_top_logprobs": _refused("send `top_logprobs`", False),
    "n_probs": _refused("send `logprobs`", 0),
    "return_flat_raw_top_logprobs_b64": _free("an option of `return_flat_raw_output_top_logprobs`"),
    "return_cached_tokens_details": _free("the usage counts cached tokens"),
    "return_spec_tokens_details": _free("`metrics` has them"),
    "return_token_offsets": _free("vLLM ignores it here, too"),
    "routed_experts_prompt_start": _free("an option of `return_routed_experts`"),
    "routed_experts_start_len": _free("an option of `return_routed_experts`"),
    # ---------------------------------------------------------------- whose it is, where it runs
    "priority": _supported("`high`, `normal`, `low`; 0 is `normal`"),
    "cache_salt": _supported("only requests with the same salt share prefixes"),
    "user": _supported("used as `cache_salt` if that is unset"),
    "metadata": _free("notes of the client"),
    "store": _free("no answer is stored"),
    "safety_identifier": _free("names a user"),
    "prompt_cache_key": _free("prefixes are found without it"),
    "prompt_cache_options": _free("prefixes are found without it"),
    "prompt_cache_retention": _free("prefixes stay cached while there is room"),
    "service_tier": _free("`priority` orders requests"),
    "verbosity": _free("write it in a message"),
    "request_id": _free("send the header `x-request-id`"),
    "rid": _free("send the header `x-request-id`"),
    "session_id": _free("the server has no sessions"),
    "session_params": _refused("send the whole conversation", {}),
    "extra_key": _free("names a class of requests"),
    "custom_labels": _free("notes of the client"),
    "kv_transfer_params": _supported("`prompt_token_ids` as `input_ids`; the rest has no effect"),
    "ec_transfer_params": _free("prefill and decoding share a replica"),
    "bootstrap_host": _free("prefill and decoding share a replica"),
    "bootstrap_port": _free("prefill and decoding share a replica"),
    "bootstrap_room": _free("prefill and decoding share a replica"),
    "disagg_prefill_dp_rank": _free("prefill and decoding share a replica"),
    "routed_dp_rank": _free("the pool chooses a replica"),
    "data_parallel_rank": _free("the pool chooses a replica"),
    "id_slot": _free("the pool chooses a replica"),
    "cache_prompt": _free("prefixes are always cached"),
    "lora_path": _refused("the server has one model"),
    "task": _refused("write it in a message"),
    # ---------------------------------------------------------------- tokens alone
    "tokens": _supported("token ids to detokenize"),
    "return_token_strs": _supported("the text of each token"),
    # ---------------------------------------------------------------- of Responses
    "responses.input": _supported("a text, or items: messages, calls, results, reasoning"),
    "responses.instructions": _supported("the system message, for this response only"),
    "responses.previous_response_id": _supported("a stored response that the input continues"),
    "responses.store": _supported("whether the server keeps the response while there is room"),
    "responses.background": _supported("answer at once, generate later; see `store`"),
    "responses.max_output_tokens": _supported("maximum of new tokens"),
    "responses.include": _supported("`message.output_text.logprobs`; others have no effect"),
    "responses.text": _supported("`format`: `text`, `json_object`, `json_schema`"),
    "responses.reasoning": _supported("`effort`, for the chat template"),
    "responses.metadata": _supported("notes of the client, returned unchanged"),
    "responses.enable_response_messages": _supported(
        "returns the prompt and the answer with their tokens"
    ),
    "responses.truncation": _refused("inputs are never shortened", "disabled", "auto"),
    "responses.max_tool_calls": _free("the server calls no tool itself"),
    "responses.conversation": _refused("send `previous_response_id`"),
    "responses.prompt": _refused("the server stores no prompts"),
    "responses.context_management": _refused("inputs are never shortened", []),
    "responses.input.id": _free("names an item"),
    "responses.input.status": _free("part of answers"),
    "responses.input.phase": _free("part of answers"),
    "responses.input.encrypted_content": _free("reasoning is read from `content`"),
    "responses.reasoning.summary": _free("reasoning is never summarized"),
    "responses.reasoning.generate_summary": _free("reasoning is never summarized"),
    "responses.text.verbosity": _free("write it in a message"),
    # ---------------------------------------------------------------- of Messages
    "anthropic.messages": _supported("turns of texts, calls, results and thinking"),
    "anthropic.system": _supported("the system message"),
    "anthropic.stop_sequences": _supported("the answer ends before the first match"),
    "anthropic.tools": _supported("functions, with `input_schema`"),
    "anthropic.tool_choice": _supported("`auto`, `any`, `none`, or one `tool`"),
    "anthropic.thinking": _supported("for the chat template, with `budget_tokens`"),
    "anthropic.output_config": _supported("`format`: a JSON schema; `effort`"),
    "anthropic.output_format": _refused("send `output_config`"),
    "anthropic.container": _refused("the server runs no code"),
    "anthropic.mcp_servers": _refused("the server calls no tool itself", []),
    "anthropic.context_management": _refused("conversations are never shortened", {}),
    "anthropic.inference_geo": _free("the server runs in one place"),
    "anthropic.speed": _free("`priority` orders requests"),
    "anthropic.cache_control": _free("prefixes are always cached"),
    "anthropic.messages.content.cache_control": _free("prefixes are always cached"),
    "anthropic.messages.content.citations": _free("part of answers"),
    "anthropic.messages.content.signature": _free("part of answers"),
    "anthropic.messages.content.data": _free("part of answers"),
    "anthropic.messages.content.is_error": _free("write it in the content"),
    "anthropic.messages.content.caller": _free("part of answers"),
    "anthropic.tools.cache_control": _free("prefixes are always cached"),
    "anthropic.tools.defer_loading": _free("the template gets all tools"),
    "anthropic.tools.eager_input_streaming": _free("arguments are always streamed"),
    "anthropic.tools.input_examples": _free("write them in the description"),
    "anthropic.thinking.display": _free("reasoning is never summarized"),
}
