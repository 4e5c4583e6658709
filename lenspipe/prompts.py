"""Prompt: one text read in memory, with no recipe file, no store and no Prefect."""

from dataclasses import dataclass

from lenspipe.corpora.documents import Document
from lenspipe.grid import Site, select_sites
from lenspipe.kernels.readout import Request
from lenspipe.kernels.windows import select_rows
from lenspipe.models.facts import read_facts
from lenspipe.models.lens_model import LensModel, load_model
from lenspipe.models.tokenizer import Tokenizer, load_tokenizer
from lenspipe.recipe import Recipe
from lenspipe.stages.capture import captured_batches
from lenspipe.stages.encode import encode_documents
from lenspipe.stages.read import read_blocks
from lenspipe.stages.work import resolved_max_length
from lenspipe.storage.arrays import Array


@dataclass(frozen=True)
class PromptReading:
    """What a model would say at every layer of one text.

    Attributes:
        model: whose.
        sites: in order of depth.
        tokens: the text's tokens as strings.
        readouts: site name -> variable -> array over the tokens (see variables.py).
        tokenizer: to spell ids.
    """

    model: LensModel
    sites: tuple[Site, ...]
    tokens: list[str]
    readouts: dict[str, dict[str, Array]]
    tokenizer: Tokenizer


def read_prompt(recipe: Recipe, text: str) -> PromptReading:
    """Read one text at every site of a recipe; its corpus and run groups are not looked at, but for BOS and device.

    Raises:
        RequestError: the text has no tokens, or more than the model has positions.
        ModelError: the model cannot be read.
    """
    facts = read_facts(recipe)
    layers = None if recipe.capture.layers == "all" else recipe.capture.layers
    sites = select_sites(recipe.capture.sites, layers, facts.n_blocks)
    tokenizer = load_tokenizer(facts.folder, recipe.model.trust_remote_code)
    limit = facts.max_positions or resolved_max_length(recipe, facts)
    shard = encode_documents([Document(text, {}, "the prompt")], recipe, limit, tokenizer)
    rows = select_rows(shard, "all")
    model = load_model(recipe, facts)
    needed = dict.fromkeys((*sites, Site("resid_post", facts.n_blocks - 1)))
    blocks = captured_batches(model, shard, rows, tuple(needed), len(rows), lambda _: None)
    request = Request(recipe.measures, min(recipe.read.top_k, facts.vocab_size))
    readouts = read_blocks(model, shard, rows, request, dict.fromkeys(sites), blocks)
    tokens = [tokenizer.hf.decode([i]) for i in shard.input_id.tolist()]
    return PromptReading(model, sites, tokens, readouts, tokenizer)
