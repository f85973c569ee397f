"""The one table of parameters: every name that clients of OpenAI, vLLM and SGLang send.

A parameter is supported; or it changes no output, and is taken; or it would change the output and
is refused, but for values that ask for nothing. `check` reads the table, the page
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
    WITHOUT_EFFECT = "taken, changes no output"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Parameter:
    kind: Kind
    about: str
    neutral: tuple[Any, ...] = ()
    """Of a refused one: values that ask for nothing, besides null."""


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
    "messages.tool_calls": _supported("the calls that the turn was"),
    "messages.tool_call_id": _supported("the call whose result the turn brings"),
    "messages.annotations": _free("comes with answers of other servers"),
    "messages.reasoning": _supported("what the turn was thinking, for the chat template"),
    "messages.reasoning_content": _supported("the same, by its other name"),
    "messages.refusal": _free("comes with answers"),
    "messages.cache_control": _free("prefixes are kept without being told"),
    "messages.audio": _refused("no sound is heard or made"),
    "messages.function_call": _supported("the call that the turn was, as it once was told of"),
    "messages.content.cache_control": _free("prefixes are kept without being told"),
    "messages.content.annotations": _free("comes with answers of other servers"),
    "messages.tool_calls.cache_control": _free("prefixes are kept without being told"),
    "prompt": _supported("a text, token ids, or a list of either"),
    "tools": _supported("functions that the target may call"),
    "tools.type": _supported("`function`"),
    "tools.function": _supported("`name`, `description`, `parameters`, `strict`"),
    "tools.cache_control": _free("prefixes are kept without being told"),
    "tools.defer_loading": _free("the template is told of all tools"),
    "tools.function.cache_control": _free("prefixes are kept without being told"),
    "tools.function.defer_loading": _free("the template is told of all tools"),
    "tool_choice": _supported("`none`, `auto`, `required`, one function, or allowed tools"),
    "parallel_tool_calls": _supported("whether there may be several calls"),
    "functions": _supported("`tools`, as they once were named"),
    "function_call": _supported("`tool_choice`, as it once was named"),
    "chat_template_kwargs": _supported("what else the chat template is told, by name"),
    "chat_template": _supported(
        "the target's own if unset; off unless `frontend.request_templates`"
    ),
    "documents": _supported("texts for the chat template"),
    "suffix": _refused("no text is filled in", ""),
    "prompt_embeds": _refused("send a text or token ids", []),
    "input_ids": _supported("the prompt's tokens; no template is rendered"),
    "prediction": _free("drafts need no hint"),
    "audio": _free("of the sound that `modalities` asks for"),
    "modalities": _refused("an answer is text", ["text"]),
    "web_search_options": _refused("the server searches nothing"),
    "moderation": _refused("the server judges no text"),
    "media_io_kwargs": _free("for images and sound, which are refused"),
    "mm_processor_kwargs": _free("for images and sound, which are refused"),
    "mm_payload": _free("for images and sound, which are refused"),
    "return_mm_kwargs": _free("for images and sound, which are refused"),
    "images_config": _free("for images and sound, which are refused"),
    "video_config": _free("for images and sound, which are refused"),
    "max_dynamic_patch": _free("for images and sound, which are refused"),
    "min_dynamic_patch": _free("for images and sound, which are refused"),
    "use_audio_in_video": _free("for images and sound, which are refused"),
    # ---------------------------------------------------------------- how many, how long
    "n": _supported("choices; choice j has the seed `seed` + j"),
    "best_of": _refused("send `n` and choose", 0, 1),
    "max_tokens": _supported("the most new tokens; completions 16, chat up to the context's end"),
    "max_completion_tokens": _supported("the same, and counts where both are given"),
    "n_predict": _refused("send `max_tokens`"),
    "min_tokens": _supported("no stop token or stop string ends the text before"),
    "stop": _supported("one text or several, 64 at most; the answer ends before the first"),
    "stop_token_ids": _supported("tokens that end the answer; they have no text"),
    "stop_regex": _refused("send `stop`"),
    "ignore_eos": _supported("go on after the target's own end-of-text tokens"),
    "include_stop_str_in_output": _supported(
        "the text has the stop string or stop token that ends it"
    ),
    "no_stop_trim": _refused("the answer ends before it", False),
    "truncate_prompt_tokens": _supported("so many of the prompt's tokens; -1: as many as fit"),
    "truncation_side": _supported("`left` keeps the last ones, `right` the first"),
    "add_special_tokens": _supported("whether a text gets those that the target expects around it"),
    "committed_token_ids": _supported("tokens of the answer that the client has"),
    # ---------------------------------------------------------------- how a token is chosen
    "temperature": _supported("1 if unset; 0 is greedy"),
    "top_p": _supported("in (0, 1]"),
    "top_k": _supported("0 or -1 keeps all"),
    "min_p": _supported("in [0, 1]"),
    "seed": _supported("the same request with the same seed has the same answer; may be negative"),
    "logit_bias": _supported("by token id, in [-100, 100]"),
    "repetition_penalty": _supported("above 0"),
    "frequency_penalty": _supported("in [-2, 2]"),
    "presence_penalty": _supported("in [-2, 2]"),
    "bad_words": _supported("texts that must not appear"),
    "allowed_token_ids": _supported("no other token is chosen"),
    "use_beam_search": _refused("tokens are chosen one by one", False),
    "length_penalty": _refused("of beam search", 1),
    "early_stopping": _refused("of beam search", False),
    "watermarking": _refused("no token is chosen by a watermark", False),
    "watermark": _refused("no token is chosen by a watermark", {}),
    "repetition_detection": _refused("no text is judged"),
    "custom_logit_processor": _refused("the server runs no code of clients"),
    "custom_params": _refused("for code of clients", {}),
    "vllm_xargs": _refused("for code of clients", {}),
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
    "guided_whitespace_pattern": _refused("documents are written in one way"),
    "guided_decoding_backend": _free("there is one"),
    "regex": _supported("`regex` of `structured_outputs`"),
    "ebnf": _supported("`grammar` of `structured_outputs`"),
    "json_schema": _supported("`json` of `structured_outputs`"),
    "structured_outputs.disable_any_whitespace": _free("documents are written in one way"),
    "structured_outputs.disable_additional_properties": _refused("say so in the schema", False),
    "structured_outputs.whitespace_pattern": _refused("documents are written in one way"),
    # ---------------------------------------------------------------- reasoning
    "reasoning_effort": _supported("for the chat template; `none` asks for no reasoning"),
    "enable_thinking": _supported("for the chat template"),
    "include_reasoning": _supported("whether the answer tells of its reasoning"),
    "separate_reasoning": _refused("reasoning is told apart, see `--reasoning-parser`", True),
    "stream_reasoning": _refused("an answer is told as it comes", True),
    "thinking": _refused("send `chat_template_kwargs`"),
    "thinking_token_budget": _supported("the most tokens of reasoning; -1 is no limit"),
    # ---------------------------------------------------------------- what is told
    "stream": _supported("events as the text is written"),
    "stream_options": _supported("`include_usage`, and `continuous_usage_stats` with it"),
    "stream_options.include_obfuscation": _free("events have no padding"),
    "stream_interval": _free("`frontend.coalesce_ms` says how often"),
    "logprobs": _supported("log-probabilities of the new tokens"),
    "top_logprobs": _supported("likeliest tokens in the place of each"),
    "prompt_logprobs": _supported("the same of the prompt's tokens"),
    "echo": _supported("the text begins with the prompt, or with the last turn of the assistant"),
    "return_token_ids": _supported("token ids of the prompt and of the answer"),
    "speculative_decoding_stats": _supported("draft tokens, those accepted, and which ones"),
    "skip_special_tokens": _supported("false: special tokens have their names as text"),
    "spaces_between_special_tokens": _refused("special tokens have no text", True),
    "return_tokens_as_token_ids": _supported("log-probabilities name a token `token_id:ID`"),
    "logprob_token_ids": _supported("log-probabilities of these tokens, in place of the likeliest"),
    "add_generation_prompt": _supported("false: the prompt does not ask for the next turn"),
    "continue_final_message": _supported("the answer goes on within the last turn"),
    "return_prompt_text": _refused("send `echo`", False),
    "return_weight_versions": _refused("weights do not change", False),
    "return_hidden_states": _refused("an answer is text", False),
    "return_routed_experts": _refused("an answer is text", False),
    "return_sampling_mask": _refused("an answer is text", False),
    "sampling_logprobs_mode": _refused("log-probabilities are the target's own"),
    "return_prompt_token_ids": _refused("send `return_token_ids`", False),
    "return_meta_info": _refused("send `return_token_ids`", False),
    "return_input_ids_in_sglext": _refused("send `return_token_ids`", False),
    "return_output_ids_in_sglext": _refused("send `return_token_ids`", False),
    "return_flat_raw_output_top_logprobs": _refused("send `top_logprobs`", False),
    "n_probs": _refused("send `logprobs`", 0),
    "return_flat_raw_top_logprobs_b64": _free("of `return_flat_raw_output_top_logprobs`"),
    "return_cached_tokens_details": _free("the usage counts cached tokens"),
    "return_spec_tokens_details": _free("`metrics` has them"),
    "return_token_offsets": _free("vLLM too takes it without effect here"),
    "routed_experts_prompt_start": _free("of `return_routed_experts`"),
    "routed_experts_start_len": _free("of `return_routed_experts`"),
    # ---------------------------------------------------------------- whose it is, where it runs
    "priority": _supported("`high`, `normal`, `low`; 0 is `normal`"),
    "cache_salt": _supported("prefixes are shared with the same salt only"),
    "user": _supported("the salt, if there is no other"),
    "metadata": _free("the client's own notes"),
    "store": _free("no answer is stored"),
    "safety_identifier": _free("names a user"),
    "prompt_cache_key": _free("prefixes are found without it"),
    "prompt_cache_options": _free("prefixes are found without it"),
    "prompt_cache_retention": _free("prefixes stay as long as there is room"),
    "service_tier": _free("`priority` orders requests"),
    "verbosity": _free("say it in a turn"),
    "request_id": _free("send the header `x-request-id`"),
    "rid": _free("send the header `x-request-id`"),
    "session_id": _free("each request is served by itself"),
    "session_params": _refused("send the whole conversation", {}),
    "extra_key": _free("names a class of requests"),
    "custom_labels": _free("the client's own notes"),
    "kv_transfer_params": _supported("`prompt_token_ids` as `input_ids`; the rest has no effect"),
    "ec_transfer_params": _free("prefill and decoding share a replica"),
    "bootstrap_host": _free("prefill and decoding share a replica"),
    "bootstrap_port": _free("prefill and decoding share a replica"),
    "bootstrap_room": _free("prefill and decoding share a replica"),
    "disagg_prefill_dp_rank": _free("prefill and decoding share a replica"),
    "routed_dp_rank": _free("the pool chooses a replica"),
    "data_parallel_rank": _free("the pool chooses a replica"),
    "id_slot": _free("the pool chooses a replica"),
    "cache_prompt": _free("prefixes are kept without being told"),
    "lora_path": _refused("one model is served"),
    "task": _refused("say it in a turn"),
    # ---------------------------------------------------------------- tokens alone
    "tokens": _supported("ids to make a text of"),
    "return_token_strs": _supported("the text of each token"),
    # ---------------------------------------------------------------- of Responses
    "responses.input": _supported("a text, or items: messages, calls, results, reasoning"),
    "responses.instructions": _supported("the system's turn, of this response alone"),
    "responses.previous_response_id": _supported("a stored response that the input goes on with"),
    "responses.store": _supported("whether the response is kept, as long as there is room"),
    "responses.background": _supported("answer at once, and write later; see `store`"),
    "responses.max_output_tokens": _supported("the most new tokens"),
    "responses.include": _supported("`message.output_text.logprobs`; others have no effect"),
    "responses.text": _supported("`format`: `text`, `json_object`, `json_schema`"),
    "responses.reasoning": _supported("`effort`, for the chat template"),
    "responses.metadata": _supported("the client's own notes, which come back"),
    "responses.enable_response_messages": _supported("the prompt and the answer with their tokens"),
    "responses.truncation": _refused("inputs are taken whole", "disabled", "auto"),
    "responses.max_tool_calls": _free("the server calls no tool itself"),
    "responses.conversation": _refused("send `previous_response_id`"),
    "responses.prompt": _refused("the server has no prompts of its own"),
    "responses.context_management": _refused("inputs are taken whole", []),
    "responses.input.id": _free("names an item"),
    "responses.input.status": _free("comes with answers"),
    "responses.input.phase": _free("comes with answers"),
    "responses.input.encrypted_content": _free("reasoning is read from `content`"),
    "responses.reasoning.summary": _free("reasoning is told as it is"),
    "responses.reasoning.generate_summary": _free("reasoning is told as it is"),
    "responses.text.verbosity": _free("say it in a turn"),
    # ---------------------------------------------------------------- of Messages
    "anthropic.messages": _supported("turns of texts, calls, results and thinking"),
    "anthropic.system": _supported("the system's turn"),
    "anthropic.stop_sequences": _supported("the answer ends before the first"),
    "anthropic.tools": _supported("functions, with `input_schema`"),
    "anthropic.tool_choice": _supported("`auto`, `any`, `none`, or one `tool`"),
    "anthropic.thinking": _supported("for the chat template, with `budget_tokens`"),
    "anthropic.output_config": _supported("`format`: a JSON schema; `effort`"),
    "anthropic.output_format": _refused("send `output_config`"),
    "anthropic.container": _refused("the server runs no code"),
    "anthropic.mcp_servers": _refused("the server calls no tool itself", []),
    "anthropic.context_management": _refused("conversations are taken whole", {}),
    "anthropic.inference_geo": _free("the server is where it is"),
    "anthropic.speed": _free("`priority` orders requests"),
    "anthropic.cache_control": _free("prefixes are kept without being told"),
    "anthropic.messages.content.cache_control": _free("prefixes are kept without being told"),
    "anthropic.messages.content.citations": _free("comes with answers"),
    "anthropic.messages.content.signature": _free("comes with answers"),
    "anthropic.messages.content.data": _free("comes with answers"),
    "anthropic.messages.content.is_error": _free("say it in the content"),
    "anthropic.messages.content.caller": _free("comes with answers"),
    "anthropic.tools.cache_control": _free("prefixes are kept without being told"),
    "anthropic.tools.defer_loading": _free("the template is told of all tools"),
    "anthropic.tools.eager_input_streaming": _free("arguments come as they are written"),
    "anthropic.tools.input_examples": _free("say them in the description"),
    "anthropic.thinking.display": _free("reasoning is told as it is"),
}
