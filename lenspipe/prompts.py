"""Prompts: a few texts read in memory, with no recipe file, no store and no Prefect; the dataset is a corpus run's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from lenspipe.analysis.opening import indexed
from lenspipe.corpora.documents import Document
from lenspipe.errors import RequestError
from lenspipe.grid import Site, select_sites
from lenspipe.kernels import readout as kernel
from lenspipe.kernels.windows import TokenShard, Window, select_rows
from lenspipe.lenses.lens import Lens
from lenspipe.models.lens_model import LensModel
from lenspipe.recipe import Recipe, make_recipe
from lenspipe.stages.capture import captured_batches
from lenspipe.stages.encode import encode_documents, token_shard
from lenspipe.stages.labels import Piece, attributes, dimensions, in_document_order, placed_marginal, small_variables
from lenspipe.stages.read import load_lenses, mean_probability, read_blocks, refuse_broken, regroup, request_of
from lenspipe.stages.work import NamedTokens, Place, sites_beside
from lenspipe.storage.arrays import Array
from lenspipe.storage.dataset import in_memory, readout_dims
from lenspipe.variables import DEFAULT_MEASURES, variables_of

Texts = str | Tensor | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
LensSource = str | Path | Lens


def logit_lens(
    model: Any,
    texts: Texts,
    *,
    sites: str | Sequence[str] | None = None,
    layers: Sequence[float] | None = None,
    positions: str | int | Sequence[int] = "all",
    lens: LensSource | Sequence[LensSource] = "logit",
    uncovered: str = "refuse",
    measures: Sequence[str] = DEFAULT_MEASURES,
    top_k: int = 10,
    targets: Sequence[str | int] = (),
    token_sets: str | Path | None = None,
    precision: str = "model",
    bos: str = "auto",
    tokenizer: Any = None,
    batch_tokens: int = 4096,
    memory: int = 2**30,
) -> xr.Dataset:
    """Read one text or a few at every layer, in memory.

    Args:
        model: a LensModel, a live transformers model in evaluation mode, or what LensModel.load takes; the last two
            pass the gate at each call.
        texts: a text or a list of texts; or token ids: one sequence, a list of sequences, or a tensor [B, S].
        sites: site names or kinds; by default the whole stream.
        layers: depths to keep, 0 to blocks; negative counts from the end.
        positions: "all", "last", or positions in each text, negative from its end.
        lens: "logit", a lens file, a Lens, or a list of these, which then becomes a dimension.
        uncovered: "refuse", or "logit" to read states that a lens has no map for by the logit lens.
        measures: as in a recipe.
        top_k: how many of the largest logits to keep.
        targets: tokens, by string or id, whose logit and rank are kept at every position (dimension `tracked`).
        token_sets: a TOML or JSON file, name -> tokens, whose probabilities are kept (dimension `set`).
        precision: "model" or "float32".
        bos: begin texts with BOS: "auto" (as the tokenizer does), "always" or "never".
        tokenizer: of a live model, the transformers tokenizer; needed for texts and for strings in the dataset.
        batch_tokens: tokens, padding included, in one forward pass.
        memory: bytes that the readout may use for logits.

    Returns:
        The dataset of a corpus run whose documents are the texts: `ds.sel(layer=3)`, `ds.lens.top_tokens()`.

    Raises:
        RequestError: an argument that cannot be; nothing has been computed then.
        ModelError: the model cannot be read, or not at these sites.
    """
    opened = open_any(model, tokenizer)
    lenses = [lens] if isinstance(lens, LensSource) else list(lens)
    given = {item.name: item for item in lenses if isinstance(item, Lens)}
    names = [item.name if isinstance(item, Lens) else str(item) for item in lenses]
    read = {"lens": names, "uncovered": uncovered, "measures": list(measures), "tracked": list(targets)}
    read |= {} if token_sets is None else {"token_sets": str(token_sets)}
    recipe = make_recipe(
        {
            "model": {"source": opened.facts.name},
            "corpus": {"source": "texts in memory", "bos": bos},
            "capture": {"positions": [positions] if isinstance(positions, int) else _listed(positions)}
            | ({} if sites is None else {"sites": _listed(sites)})
            | ({} if layers is None else {"layers": list(layers)}),
            "read": read | {"top_k": top_k, "precision": precision},
            "run": {"batch_tokens": batch_tokens, "memory": memory},
        },
        origin="logit_lens",
    )
    chosen = select_sites(recipe.capture.sites, layers, opened.facts.n_blocks)
    return _read(opened, recipe, chosen, _encode(opened, recipe, texts), given)


def open_any(model: Any, tokenizer: Any = None) -> LensModel:
    """Open what a user names as a model: a LensModel, a live transformers model, or a checkpoint.

    Raises:
        RequestError, ModelError: as LensModel.load and open_model.
    """
    if isinstance(model, LensModel):
        return model
    if isinstance(model, str | Path):
        return LensModel.load(model)
    if not isinstance(model, torch.nn.Module):
        raise RequestError(f"model must be a LensModel, a transformers model or a name; found {type(model).__name__}")
    return LensModel.of(model, tokenizer)


def _listed(value: str | Sequence[Any]) -> Any:
    return value if isinstance(value, str) else list(value)


def _encode(model: LensModel, recipe: Recipe, texts: Texts) -> TokenShard:
    if isinstance(texts, str):
        texts = [texts]
    if len(texts) == 0:
        raise RequestError("there is no text to read: texts is empty")
    limit = model.facts.max_positions or 2**31 - 1
    if all(isinstance(text, str) for text in texts):
        documents = [Document(text, {}, f"text {i}") for i, text in enumerate(map(str, texts))]
        strict = recipe.model_copy(update={"corpus": recipe.corpus.model_copy(update={"overflow": "error"})})
        return encode_documents(documents, strict, limit, model.require_tokenizer())
    if any(isinstance(text, str) for text in texts):
        raise RequestError("texts mixes strings and token ids: give one or the other")
    one = (isinstance(texts, Tensor) and texts.dim() == 1) or isinstance(texts[0], int | np.integer)
    sequences = [model.check_ids(ids) for ids in ([texts] if one else texts)]  # type: ignore[list-item, arg-type, unused-ignore]
    windows = [(i, 0, Window(tuple(ids.tolist()), 0, 0)) for i, ids in enumerate(sequences)]
    special = model.tokenizer.special_ids if model.tokenizer else frozenset()
    return token_shard(windows, [(-1, 0)] * len(sequences), special)


def _read(
    model: LensModel, recipe: Recipe, sites: Sequence[Site], shard: TokenShard, given: Mapping[str, Lens]
) -> xr.Dataset:
    facts = model.facts
    named = NamedTokens.find(recipe, lambda token: _single(model, token))
    if recipe.read.top_k > facts.vocab_size:
        raise RequestError(
            f"top_k is {recipe.read.top_k}, and {facts.name} has {facts.vocab_size} tokens: ask for fewer"
        )
    lenses = load_lenses(recipe, facts, sites, given)
    rows = select_rows(shard, recipe.capture.positions)
    if not len(rows):
        raise RequestError(
            f"no text has a token at positions {recipe.capture.positions}: the longest has "
            f"{int(shard.length.max())} tokens"
        )
    needed = tuple(dict.fromkeys([*sites, *sites_beside(recipe.measures, sites, facts)]))
    model.require(needed)
    unembed = model.unembed.at(recipe.read.precision)
    batches = captured_batches(model, shard, rows, needed, recipe.run.batch_tokens, lambda _: None)
    n_states = len(needed) + len(lenses) * len(sites)
    blocks = regroup(batches, kernel.rows_per_block(recipe.run.memory, unembed.head, n_states, "memory"))
    request = request_of(recipe, named)
    places = [(name, site) for name in lenses for site in sites]
    readouts = read_blocks(unembed, facts, shard, rows, request, lenses, places, blocks)
    refuse_broken(readouts, (0, shard.n_documents), facts)
    piece = Piece(0, shard.n_documents, shard, rows, {})
    sizes = dimensions(recipe, list(lenses), sites, [piece], facts.vocab_size, named)
    vocabulary = (
        model.tokenizer.strings(facts.vocab_size) if model.tokenizer else [f"<{i}>" for i in range(facts.vocab_size)]
    )
    small = small_variables(recipe, list(lenses), sites, [piece], vocabulary, named)
    if "marginal" in recipe.measures:
        small |= placed_marginal([mean_probability([table]) for table in readouts.values()], sizes)
    ds = in_memory(small, attributes(recipe, facts, model.gate.as_dict(), {}))
    return indexed(ds.assign(_stacked(recipe, readouts, piece, sizes)))


def _single(model: LensModel, token: str | int) -> int:
    n_ids = model.facts.vocab_size
    if isinstance(token, str):
        return model.require_tokenizer().single(token, n_ids)
    if not 0 <= token < n_ids:
        raise RequestError(f"target id {token}: {model.facts.name} has ids 0 to {n_ids - 1}")
    return token


def _stacked(
    recipe: Recipe, readouts: Mapping[Place, Mapping[str, Array]], piece: Piece, sizes: Mapping[str, int]
) -> dict[str, xr.Variable]:
    ordered = [in_document_order(table, piece.rows) for table in readouts.values()]
    found = {}
    for variable in variables_of(recipe.measures):
        if variable.is_readout:
            dims = readout_dims(variable, sizes)
            values = np.stack([table[variable.name] for table in ordered]).reshape([sizes[dim] for dim in dims])
            found[variable.name] = xr.Variable(dims, values, variable.attributes)
    return found
