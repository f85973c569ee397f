"""Load a target and its draft, and refuse what could not be served exactly.

A pair fits when both models speak the same vocabulary: the same token for every id and the same
special tokens. Embeddings may be padded to different sizes. Both models must attend to the whole
context, and their position encoding must not depend on what else is in the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, PreTrainedModel

from replicas.config import ReplicaConfig
from replicas.demo import DRAFT_DIR, TARGET_DIR
from replicas.drafters.eagle3 import Head, HeadConfig, HeadRefused, load_head, read_head
from replicas.models.checkpoint import read_config, read_model
from replicas.models.gguf import converted
from replicas.models.names import TINY, ModelRefused, gguf_file
from replicas.models.paged_model import ATTENTION
from replicas.models.planted import plant, planted_config
from replicas.models.shapes import ACCEPTANCE, BadPlantedName, is_planted, parse_planted
from replicas.models.sharding import NotDivisible, shard

_AT_REVISION = re.compile(r"[\w.-]+/[\w.-]+@[\w./-]+")
_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
"""Of a model on the hub: all that is read. Of a draft also pickled weights: heads may have them."""


class PairRefused(ValueError):
    """The models cannot be served together, or not exactly; the message says what differs."""


@dataclass(frozen=True)
class Pair:
    """A target, maybe a draft, and what the rest must know of them."""

    target: PreTrainedModel
    draft: PreTrainedModel | Head | None
    context_len: int
    vocab_size: int
    """Ids in [0, vocab_size) are tokens that a prompt may hold."""
    target_name: str
    draft_name: str
    device: torch.device
    dtype: torch.dtype


def resolve(name: str, role: str = "target", weights: str | None = None) -> str:
    """The directory or hub name behind `name`, from which transformers loads.

    `REPO@REVISION` is a branch, tag or commit of a hub's model. Of a GGUF file it has config and
    tokenizer; with `weights`, the dtype to have them in, also those. Raises OSError for what can
    only be a directory or file and is none, and PairRefused for a file that cannot be read.
    """
    if name == TINY:
        return str(TARGET_DIR if role == "target" else DRAFT_DIR)
    try:
        if not is_planted(name) and (file := gguf_file(name)) is not None:
            return str(converted(file, weights))
    except ModelRefused as error:
        raise PairRefused(f"{role}: {error}") from error
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise NotADirectoryError(f"{role}: {name!r} is no directory of this machine")
    if _AT_REVISION.fullmatch(name) and not Path(name).is_dir():
        repo, _, revision = name.partition("@")
        files = [*_FILES, "*.bin"] if role == "draft" else _FILES
        return snapshot_download(repo, revision=revision, allow_patterns=files)
    return name


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one, a GPU without a number this thread's current one.

    A GPU's number is always named: torch makes no device current that has none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PairRefused(f"device: {name} was asked for, but torch sees no GPU")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def dtype_of(config: ReplicaConfig) -> torch.dtype:
    """Of weights and KV cache. A checkpoint that names none of ours counts as float32.

    Raises what reading the target's config raises.
    """
    if config.dtype == "auto" and _may_be_gpu(config.device):
        whole = _load_config(resolve(config.target), config, "target")
        own = getattr(whole.get_text_config(), "dtype", None)
        return own if own in (torch.bfloat16, torch.float16) else torch.float32
    dtype: torch.dtype = getattr(torch, "float32" if config.dtype == "auto" else config.dtype)
    return dtype


def dtype_name(config: ReplicaConfig) -> str:
    """As `float32`."""
    return str(dtype_of(config)).removeprefix("torch.")


def _may_be_gpu(device: str) -> bool:
    """Whether a setting `device` stands for a GPU, which need not be here where it names one."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


@dataclass(frozen=True)
class PairFiles:
    """What is known of a pair before its weights are read."""

    target_config: Any
    draft_config: Any
    """transformers' of models, a HeadConfig of a head; None without a draft."""
    context_len: int
    vocab_size: int


def read_pair(config: ReplicaConfig) -> PairFiles:
    """Read configs and tokenizers and check that the models fit together.

    Raises PairRefused, or OSError for a name not found.
    """
    target_path = resolve(config.target, "target")
    name = config.drafting.model
    draft_path = None if name is None else resolve(name, "draft")
    target_config = _load_config(target_path, config, "target")
    draft_config = None
    vocab_size = target_config.vocab_size
    if draft_path is not None and config.drafting.method == "eagle3":
        try:
            draft_config = read_head(draft_path, target_config)
        except HeadRefused as error:
            raise PairRefused(f"speculative.model: {draft_path}: {error}") from None
        except OSError as error:
            raise OSError(f"speculative.model: {error}") from error
    elif draft_path is not None:
        draft_config = _load_config(draft_path, config, "draft")
        vocab_size = _check_vocabularies(target_path, draft_path, config)
        vocab_size = min(vocab_size, target_config.vocab_size, draft_config.vocab_size)
    context_len = _context_len(target_config, config.context_len)
    # Only the target's output counts: a draft that sees more than it was trained for drafts worse.
    check_attention(target_config, context_len)
    return PairFiles(target_config, draft_config, context_len, int(vocab_size))


def load_pair(config: ReplicaConfig, files: PairFiles | None = None) -> Pair:
    """Load both models, `files` being what `read_pair` returned; raises what that raises.

    With `tensor_parallel` the target is this rank's part of it; `replicas.parallel` loads them all.
    """
    device = resolve_device(config.device)
    leave_out_cudnn(device)
    # Whatever can be refused is refused before gigabytes of weights are read.
    files = files or read_pair(config)
    rank = dist.get_rank() if config.tensor_parallel > 1 else 0
    target_path = resolve(config.target, "target", dtype_name(config))
    name = config.drafting.model
    draft_path = None if name is None else resolve(name, "draft", dtype_name(config))
    target = _load_model(
        target_path, config, device, ACCEPTANCE, lambda whole: take_part(whole, config, rank)
    )
    draft: PreTrainedModel | Head | None = None
    if isinstance(files.draft_config, HeadConfig):
        assert draft_path is not None
        try:
            draft = load_head(draft_path, files.draft_config, target.dtype, device)
        except HeadRefused as error:
            raise PairRefused(f"speculative.model: {draft_path}: {error}") from None
    elif draft_path is not None:
        # A planted draft always follows the map: acceptance is the target's business.
        draft = _load_model(draft_path, config, device, 1.0)
    return Pair(
        target=target,
        draft=draft,
        context_len=files.context_len,
        vocab_size=files.vocab_size,
        target_name=config.target,
        draft_name=name or "",
        device=device,
        dtype=dtype_of(config),
    )


def leave_out_cudnn(device: torch.device) -> None:
    """Have torch's attention on a GPU take its other kernels, in this process.

    On Hopper and later it prefers cuDNN's, which is built anew for every shape, takes a good part
    of a second for that, and keeps them all; prompts have ever new shapes.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def take_part(target: PreTrainedModel, config: ReplicaConfig, rank: int) -> None:
    """Keep what `rank` holds of a target with `tensor_parallel`; without, that is all of it.

    Raises PairRefused.
    """
    if config.tensor_parallel == 1:
        return
    try:
        shard(target, rank, config.tensor_parallel)
    except NotDivisible as error:
        raise PairRefused(f"tensor_parallel: {error}") from None


def check_attention(config: Any, context_len: int) -> None:
    """Raise PairRefused for a model whose output would depend on its batch mates here."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    windowed = "sliding_attention" in kinds or (kinds == {"full_attention"} and window is not None)
    other = kinds - {"full_attention", "sliding_attention"}
    if other:
        raise PairRefused(
            f"{config.model_type}: layers of kind {sorted(other)}; only full attention is served"
        )
    if windowed and (window is None or window < context_len):
        raise PairRefused(
            f"{config.model_type}: sliding window {window} is shorter than the context of"
            f" {context_len}; set context_len to at most {window}"
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if kind in ("dynamic", "longrope"):
        raise PairRefused(
            f"{config.model_type}: rope_type {kind!r} depends on the longest row of a batch, so"
            " output would depend on batch mates"
        )


def _load_config(path: str, config: ReplicaConfig, role: str) -> Any:
    if is_planted(path):
        return planted_config(parse_planted(path))
    try:
        loaded = read_config(path, config.trust_remote_code)
    except OSError as error:
        raise OSError(f"{role}: {error}") from error
    except ValueError as error:
        raise PairRefused(f"{role}: {error}") from error
    if getattr(loaded, "is_encoder_decoder", False):
        raise PairRefused(f"{path}: an encoder-decoder model; only decoder-only models are served")
    return loaded


def _context_len(target_config: Any, wanted: int | None) -> int:
    limit = getattr(target_config, "max_position_embeddings", None)
    if wanted is not None and limit is not None and wanted > limit:
        raise PairRefused(f"context_len: {wanted} is over the target's own limit of {limit}")
    context_len = wanted or limit
    if context_len is None:
        raise PairRefused("context_len: the target's config states no limit, so one must be given")
    return int(context_len)


def _check_vocabularies(target_path: str, draft_path: str, config: ReplicaConfig) -> int:
    """Compare token for token; returns one more than the highest id."""
    if is_planted(target_path) or is_planted(draft_path):
        return _check_planted(target_path, draft_path, config)
    remote = config.trust_remote_code
    target = AutoTokenizer.from_pretrained(target_path, trust_remote_code=remote)
    draft = AutoTokenizer.from_pretrained(draft_path, trust_remote_code=remote)
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        differing = sorted(
            (
                token
                for token in ours.keys() | theirs.keys()
                if ours.get(token) != theirs.get(token)
            ),
            key=lambda token: (ours.get(token, theirs.get(token)), token),
        )
        token = differing[0]
        raise PairRefused(
            f"target and draft have different vocabularies: {len(ours)} and {len(theirs)} tokens,"
            f" {len(differing)} of them differ; first {token!r}, which is"
            f" {ours.get(token, 'absent')} in the target and {theirs.get(token, 'absent')} in the"
            " draft"
        )
    for name in ("bos_token_id", "eos_token_id"):
        ours_id, theirs_id = getattr(target, name), getattr(draft, name)
        if ours_id != theirs_id:
            raise PairRefused(
                f"target and draft have different special tokens: {name} is {ours_id} in the"
                f" target and {theirs_id} in the draft"
            )
    return int(max(ours.values())) + 1


def _check_planted(target_path: str, draft_path: str, config: ReplicaConfig) -> int:
    """Planted models have no tokenizer: what they share is the map over their vocabulary."""
    if not (is_planted(target_path) and is_planted(draft_path)):
        raise PairRefused(
            f"target {target_path} and draft {draft_path}: a planted model has no tokenizer and"
            " goes with another planted model only"
        )
    ours = int(_load_config(target_path, config, "target").vocab_size)
    theirs = int(_load_config(draft_path, config, "draft").vocab_size)
    if ours != theirs:
        raise PairRefused(
            f"target and draft have different vocabularies: {ours} and {theirs} tokens"
        )
    return ours


def _load_model(
    path: str,
    config: ReplicaConfig,
    device: torch.device,
    acceptance: float,
    divide: Callable[[PreTrainedModel], None] = lambda model: None,
) -> PreTrainedModel:
    if is_planted(path):
        try:
            model = plant(path, device, dtype_of(config), ATTENTION, acceptance).model
        except BadPlantedName as error:
            raise PairRefused(str(error)) from None
        divide(model)
        return model
    model = read_model(path, config.trust_remote_code, dtype_of(config), ATTENTION)
    # Here still on the CPU: the device needs room for a part only.
    divide(model)
    return model.to(device)
