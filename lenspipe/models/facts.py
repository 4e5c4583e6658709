"""ModelFacts: what can be known of a checkpoint without loading it, and so without importing torch.

Checkpoint: a folder with config.json, weights and a tokenizer. A hub id becomes its snapshot folder; a GGUF file
becomes a safetensors folder in lenspipe's cache, converted once and named by the file's digest.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenspipe.errors import ModelError, RequestError, UnconvertedError
from lenspipe.folders import cache_folder
from lenspipe.keys import digest
from lenspipe.models.digests import digest_files
from lenspipe.recipe import Recipe

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)
_DEPTH = ("decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers_block_type")
WIDTH = ("hidden_size", "n_embd", "d_model")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_VOCABULARY = ("unpadded_vocab_size", "vocab_size")
_BLOCKS_ELSEWHERE = {"longcat_flash": ("num_layers",)}  # counts its attentions, two a block, as hidden layers
_PROVENANCE = ("_name_or_path", "name_or_path", "transformers_version", "local_files_only", "_commit_hash")
_CAUSAL = re.compile(r"(CausalLM|LMHeadModel|ForConditionalGeneration|BertGenerationDecoder)$")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a plan needs of a model.

    Attributes:
        name: for people: hub id, folder or file name.
        folder: the checkpoint.
        n_blocks, d_model, vocab_size: depth, width, rows of the unembedding.
        max_positions: the longest sequence, or None where the checkpoint names none.
        dtype: what it will compute in.
        digest: of weights, config and remote code.
        tokenizer_digest: of the tokenizer's files.
    """

    name: str
    folder: Path
    n_blocks: int
    d_model: int
    vocab_size: int
    max_positions: int | None
    dtype: str
    digest: str
    tokenizer_digest: str


def gguf_folder(path: Path) -> Path:
    """Name the cache folder of a GGUF file's conversion."""
    return cache_folder() / "gguf" / digest_files([path])[path.name]


def find_checkpoint(recipe: Recipe) -> Path:
    """Find the checkpoint folder; a hub id is fetched if it is not in the hub's cache.

    Raises:
        RequestError: nothing there, or the hub knows no such model or revision.
        UnconvertedError: a GGUF file that has not been converted yet; models.gguf does that.
    """
    source = recipe.model.source
    local = recipe.path(source)
    if source.endswith(".gguf"):
        if not local.is_file():
            raise RequestError(f"model.source {source!r}: no such file (looked at {local})")
        folder = gguf_folder(local)
        if not (folder / "config.json").is_file():
            raise UnconvertedError(f"{local} has to be converted to safetensors first: `lenspipe run` does that, once")
        return folder
    if local.is_dir():
        if recipe.model.revision:
            raise RequestError(f"model.revision is for hub ids, and {source!r} is a folder: leave revision out")
        return local
    if source.startswith((".", "/", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise RequestError(f"model.source {source!r}: no such folder (looked at {local})")
    return _snapshot(source, recipe.model.revision)


def _snapshot(name: str, revision: str | None) -> Path:
    import huggingface_hub as hub  # noqa: PLC0415 -- slow to import, and only hub models need it
    from huggingface_hub import errors  # noqa: PLC0415

    patterns = ["*.json", "*.safetensors", *TOKENIZER, "*.py"]
    asked = f"model {name!r}, revision {revision or 'main'!r}"
    try:
        try:
            return Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True))
        except errors.LocalEntryNotFoundError:
            return Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.RevisionNotFoundError:
        raise RequestError(f"{asked}: the hub has the model but no such revision; check model.revision") from None
    except errors.RepositoryNotFoundError:
        raise RequestError(f"{asked}: no such folder here and no such model on the hub (or it needs a login)") from None
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        summary = str(error).splitlines()[0]
        raise RequestError(
            f"{asked}: no such folder here, not in the hub's cache, and the hub cannot be reached ({summary})"
        ) from None


def read_facts(recipe: Recipe) -> ModelFacts:
    """Learn of the recipe's model all that can be learned without loading it.

    Raises:
        ModelError: not a causal language model, or no weights or tokenizer in the checkpoint.
        RequestError: no such model, or a longer max_length than it has positions for.
        UnconvertedError: a GGUF file that has not been converted yet.
    """
    folder = find_checkpoint(recipe)
    name = Path(recipe.model.source).name if folder != Path(recipe.model.source) else folder.name
    config = _config(folder, name)
    text = text_config(config)
    _refuse_other_kinds(config, name)
    n_blocks, d_model, vocab_size = sizes_of(config, name)
    weights = [path for pattern in WEIGHTS for path in folder.glob(pattern)]
    if any(path.suffix == ".safetensors" for path in weights):
        weights = [path for path in weights if path.suffix == ".safetensors"]
    if not weights:
        raise ModelError(f"model {name}: {folder} has no weights; expected one of {', '.join(WEIGHTS)}")
    tokenizer = {path for pattern in TOKENIZER for path in folder.glob(pattern)}
    if not tokenizer:
        raise ModelError(f"model {name}: {folder} has no tokenizer; save the model's tokenizer there")
    code = folder.glob("*.py") if recipe.model.trust_remote_code else ()
    dtype: str = recipe.model.dtype
    if dtype == "auto":
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
        dtype = dtype.removeprefix("torch.") if dtype != "None" else "float32"
    return ModelFacts(
        name=name.removesuffix(".gguf"),
        folder=folder,
        n_blocks=n_blocks,
        d_model=d_model,
        vocab_size=vocab_size,
        max_positions=next((text[field] for field in POSITIONS if isinstance(text.get(field), int)), None),
        dtype=dtype,
        digest=digest({"config": _plain(config), "files": digest_files([*weights, *code])}),
        tokenizer_digest=_tokenizer_digest(tokenizer, name),
    )


def declared(config: Any, names: tuple[str, ...]) -> int | None:
    """Read the first of some fields that a live config has."""
    return next((value for value in (getattr(config, name, None) for name in names) if isinstance(value, int)), None)


def live_facts(hf: Any, n_blocks: int, d_model: int, vocab_size: int) -> ModelFacts:
    """Learn of a live model what it says itself; it has no folder and no digests."""
    return ModelFacts(
        name=Path(str(hf.config._name_or_path or type(hf).__name__)).name,
        folder=Path(),
        n_blocks=n_blocks,
        d_model=d_model,
        vocab_size=vocab_size,
        max_positions=declared(hf.config.get_text_config(decoder=True), POSITIONS),
        dtype=str(hf.dtype).removeprefix("torch."),
        digest="",
        tokenizer_digest="",
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the language model's part of a config: the whole, or one nested in it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def sizes_of(config: Mapping[str, Any], name: str) -> tuple[int, int, int]:
    """Read depth, width and number of logits off a config.json.

    Raises:
        ModelError: it does not name them.
    """
    text = text_config(config)
    depth = _BLOCKS_ELSEWHERE.get(str(text.get("model_type")), _DEPTH)
    return _number(text, depth, name), _number(text, WIDTH, name), _number(text, _VOCABULARY, name)


def _config(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {name}: {folder} has no config.json, so it is no checkpoint")
    return _read_object(folder / "config.json", name)


def _read_object(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name}: cannot read {path}: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"model {name}: {path} is not a JSON object")
    return found


def _tokenizer_digest(files: set[Path], name: str) -> str:
    """Digest a tokenizer: its files' bytes, but for the settings, which also say how they were fetched."""
    settings = {path for path in files if path.name == "tokenizer_config.json"}
    parts: dict[str, Any] = {path.name: _plain(_read_object(path, name)) for path in settings}
    return digest(parts | digest_files(files - settings))


def _refuse_other_kinds(config: Mapping[str, Any], name: str) -> None:
    kinds = [str(kind) for kind in config.get("architectures") or ()]
    found = f"model {name} is {' / '.join(kinds) or config.get('model_type', 'of unknown kind')}"
    if config.get("is_encoder_decoder"):
        raise ModelError(f"{found}, an encoder-decoder: the logit lens reads decoder-only language models")
    if kinds and not any(_CAUSAL.search(kind) for kind in kinds):
        masked = any("MaskedLM" in kind or "PreTraining" in kind for kind in kinds)
        reason = (
            "an encoder" if masked else "a checkpoint without a language-model head, which would be made up at random"
        )
        raise ModelError(f"{found}, {reason}: name a checkpoint saved from a ...ForCausalLM class")


def _number(config: Mapping[str, Any], names: tuple[str, ...], name: str) -> int:
    for field in names:
        found = config.get(field)
        if isinstance(found, list):  # of the kinds of all blocks
            found = len(found)
        if isinstance(found, int) and found > 0:
            return found
    raise ModelError(f"model {name}: config.json names none of {', '.join(names)}")


def _plain(config: Mapping[str, Any]) -> Any:
    """Drop what says where, how and by whom a config was written, which changes no number."""
    kept = {key: value for key, value in config.items() if key not in _PROVENANCE}
    return json.loads(json.dumps(kept), parse_constant=str)
