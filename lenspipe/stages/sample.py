"""Sample: what a tokenizer and a model computed when a store first saw them, for every later run to be held to.

Keys name the files of a model, and not the versions of the libraries that run them: most of those change nothing, and a
month of results must outlive them. Where one does change the numbers, here or on one of many workers, its results would
lie under the keys of the others'. So whoever adds to a store computes the same small sample first, and compares.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lenspipe.errors import RequestError
from lenspipe.grid import Site
from lenspipe.keys import artifact_key
from lenspipe.models.facts import ModelFacts
from lenspipe.models.lens_model import LensModel
from lenspipe.models.structure import probe_ids
from lenspipe.models.tokenizer import Tokenizer
from lenspipe.recipe import Recipe
from lenspipe.stages.work import SAMPLE, model_inputs
from lenspipe.storage.arrays import Array, read_table, write_table
from lenspipe.storage.artifacts import ArtifactStore

TEXT = "The naïve café's 1,024 «tests»:\n\tif x != 3.14: print('½ — 好的, שלום 🙂')  # don't  Ünïcode\r\n"
"""Scripts, digits, signs, contractions and blanks: where versions of tokenizers have differed."""

COLUMNS = 64
"""Logits compared of each state."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}
"""Largest difference of a layer's logits, in their standard deviations, that another device or kernel may make.

In SmolLM2-135M, other kernels and another attention implementation make 1.5e-6, 0.03 and 0.002.
"""


_held: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
"""Per model in memory, what it has been compared with."""


def hold_tokenizer(store: ArtifactStore, facts: ModelFacts, tokenizer: Tokenizer) -> None:
    """Make sure that a tokenizer cuts a text as it did when the store first saw it.

    Raises:
        RequestError: it does not; names the versions.
    """
    inputs = {"tokenizer": facts.tokenizer_digest}
    key = artifact_key(SAMPLE, 1, inputs)
    ids = np.array(tokenizer.pieces(TEXT), dtype=np.int64)
    _publish(store, key, inputs, lambda: {"ids": ids})
    first, versions = _first(store, key)
    if not np.array_equal(first.get("ids", ()), ids):
        raise _refusal(
            store,
            versions,
            f"the tokenizer of {facts.name} cuts a sample text into other tokens than when {store} first saw it",
        )


def hold_model(store: ArtifactStore, recipe: Recipe, model: LensModel) -> None:
    """Make sure that a model computes what it did when the store first saw it: the logits of every layer.

    Raises:
        RequestError: it does not; names the layer, the difference and the versions.
    """
    inputs = model_inputs(recipe, model.facts)
    key = artifact_key(SAMPLE, 1, inputs)
    held = _held.setdefault(model.hf, set())
    if (name := f"{store.root} {key}") in held:
        return

    def computed() -> dict[str, Array]:
        ids = probe_ids(model.hf)[0]
        return {"ids": ids.cpu().numpy(), "logits": _logits(model, ids)}

    _publish(store, key, inputs, computed)
    first, versions = _first(store, key)
    with store.understood(SAMPLE, key):
        ids = torch.from_numpy(first["ids"])
        if ids.dim() != 1 or ids.dtype != torch.int64 or not all(0 <= i < model.n_inputs for i in ids.tolist()):
            raise ValueError("these are no tokens of this model")
        there, here = first["logits"], _logits(model, ids)
        if there.shape != here.shape:
            raise ValueError("these are no logits of this model")
    apart, tolerance = _apart(there, here), TOLERANCE[model.facts.dtype]
    if (worst := apart[layer := int(np.argmax(apart))]) > tolerance:
        raise _refusal(
            store,
            versions,
            f"{model.facts.name} computes other numbers than when {store} first saw it: of a sample text, the logits "
            f"after block {layer} are {worst:.2g} of their standard deviation apart, at most {tolerance:g} expected",
        )
    held.add(name)


def _publish(
    store: ArtifactStore, key: str, inputs: Mapping[str, Any], computed: Callable[[], Mapping[str, Array]]
) -> None:
    if not store.is_whole(SAMPLE, key):
        with store.publish(SAMPLE, key, inputs) as draft:
            write_table(draft.folder, computed())
            draft.attributes["versions"] = _versions()


def _first(store: ArtifactStore, key: str) -> tuple[dict[str, Array], dict[str, str]]:
    """What whoever came first has computed, and with which versions."""
    arrays, manifest = read_table(store, SAMPLE, key), store.manifest(SAMPLE, key)
    with store.understood(SAMPLE, key):
        return arrays, {str(k): str(v) for k, v in manifest.attributes["versions"].items()} if manifest else {}


def _logits(model: LensModel, ids: Tensor) -> Array:
    """Read a few logits after each block: float32 [block, token, COLUMNS]."""
    ids = ids[None].to(model.device)
    sites = [Site("resid_post", block) for block in range(model.facts.n_blocks)]
    columns = torch.linspace(0, model.facts.vocab_size - 1, COLUMNS).long()
    states = model.states(ids, torch.ones_like(ids), sites)
    return np.stack([model.unembed.logits(states[site][0])[:, columns].cpu().numpy() for site in sites])


def _apart(there: Array, here: Array) -> Array:
    """Per layer, the median token's difference of logits, in the layer's standard deviation: [block].

    Not the largest: where a model chooses experts, a last bit may send one token elsewhere.
    """
    finite = np.isfinite(there)
    if not np.array_equal(finite, np.isfinite(here)):
        return np.full(len(there), np.inf)
    there, here = (np.where(finite, logits, 0).astype(np.float64) for logits in (there, here))
    spread = np.maximum(there.std(axis=(1, 2)), np.finfo(np.float32).tiny)
    per_token: Array = np.sqrt(np.mean((there - here) ** 2, axis=2)) / spread[:, None]
    apart: Array = np.median(per_token, axis=1)
    return apart


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}


def _refusal(store: ArtifactStore, versions: Mapping[str, str], found: str) -> RequestError:
    there, here = (", ".join(f"{name} {each[name]}" for name in sorted(each)) for each in (versions, _versions()))
    return RequestError(
        f"{found}. Then it was {there}; now it is {here}. Use what was used then, or another run.store: the two would "
        "mix in one dataset"
    )
