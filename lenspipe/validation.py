"""Validation: a lens scored on a corpus, by how far its predictions are from the model's own.

Score: KL(p_final || p_layer) in nats, the mean over documents of each document's mean over its plain tokens. A lens
is of use at a layer where its score is below the logit lens's.
"""

from itertools import islice

import numpy as np
import pandas as pd

from lenspipe.analysis import layer_table
from lenspipe.corpora.documents import read_documents
from lenspipe.lenses.lens import LOGIT
from lenspipe.models.facts import read_facts
from lenspipe.models.lens_model import load_model
from lenspipe.models.tokenizer import load_tokenizer
from lenspipe.prompts import logit_lens
from lenspipe.recipe import Recipe
from lenspipe.stages.encode import encode_documents
from lenspipe.stages.read import load_lenses
from lenspipe.stages.work import resolved_max_length


def validate_lens(recipe: Recipe, documents: int = 16) -> pd.DataFrame:
    """Score the lenses of a recipe on the first documents of its corpus, in memory.

    Args:
        recipe: whose model, corpus and lenses.
        documents: how many.

    Returns:
        One row a layer, indexed by layer; a column of scores for each lens, the logit lens first. NaN where a lens has
        no map.

    Raises:
        RequestError, ModelError: the recipe cannot be carried out.
    """
    facts = read_facts(recipe)
    tokenizer = load_tokenizer(facts.folder, recipe.model.trust_remote_code)
    plain = recipe.model_copy(update={"read": recipe.read.model_copy(update={"uncovered": "logit"})})
    lenses = load_lenses(plain, facts, ())
    texts = list(islice(read_documents(recipe), documents))
    shard = encode_documents(texts, recipe, resolved_max_length(recipe, facts), tokenizer)
    sequences = [ids.tolist() for ids in np.split(shard.input_id, shard.offset[1:])]
    model = load_model(recipe, facts, tokenizer)
    ds = logit_lens(
        model,
        sequences,
        lens=[LOGIT, *(lens for lens in lenses.values() if lens.kind != "logit")],
        uncovered="logit",
        measures=["kl_final"],
        precision=recipe.read.precision,
        batch_tokens=recipe.run.batch_tokens,
        memory=recipe.run.memory,
    )
    parts = [ds.sel(lens=name) for name in ds["lens"].values] if "lens" in ds.dims else [ds]
    scores = pd.DataFrame({str(part["lens"].values): layer_table(part)["kl_final"] for part in parts})
    for name, lens in lenses.items():
        scores.loc[[not lens.covers(layer) for layer in scores.index], name] = float("nan")
    return scores
