"""Variables: every variable of the dataset, declared once.

Name, dimensions, type, unit, meaning, how it is computed, and the measure that brings it. The dataset's
attributes, the kernel's outputs, the checks and the docs page all come from this table.
Units: nats for information and for logits (whose differences are nats), "1" for counts and ids.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

Dim = Literal["lens", "layer", "token", "k", "document", "tracked", "set", "vocab"]


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable of the dataset."""

    name: str
    dims: tuple[Dim, ...]
    dtype: str
    units: str
    long_name: str
    definition: str
    measure: str | None = None
    missing: float | int | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """What is written beside the variable in the dataset."""
        found = {"long_name": self.long_name, "units": self.units, "definition": self.definition}
        return found if self.missing is None else {**found, "missing": str(self.missing)}

    @property
    def is_readout(self) -> bool:
        """Whether the read stage computes it, per layer and token."""
        return self.dims[:2] == ("layer", "token")


Measure = Literal[
    "topk", "logsumexp", "entropy", "target", "kl_final",
    "varentropy", "renyi2", "margin", "kl_reverse", "js_final", "final_top1", "target_0", "target_2", "target_3",
    "residual_norm", "cosine_final", "cosine_previous", "marginal",
]  # fmt: skip
"""What [read] measures may ask for; `tracked`, `token_sets` and `answer` come with settings of their own."""

MEASURES: tuple[Measure, ...] = get_args(Measure)
DEFAULT_MEASURES: tuple[Measure, ...] = ("topk", "logsumexp", "entropy", "target", "kl_final")

AGAINST_FINAL = frozenset({"kl_final", "kl_reverse", "js_final", "final_top1", "cosine_final"})
"""Measures that compare a state with the last layer's of the same row."""

OFFSETS = {"target_0": 0, "target": 1, "target_2": 2, "target_3": 3}
"""How many tokens ahead a measure looks for the token whose logit and rank it gives."""

_Z = "z are the logits of the state read by Unembed: final norm, unembedding, bias, scale, then softcap; float32"
_NATS = "nats"

VARIABLES: tuple[Variable, ...] = (
    Variable("topk_id", ("layer", "token", "k"), "int32", "1", "ids of the k largest logits",
             "argsort of z, descending, ties to the lower id; " + _Z, "topk"),
    Variable("topk_logit", ("layer", "token", "k"), "float32", _NATS, "the k largest logits",
             "z at topk_id; log-probability is topk_logit - logsumexp", "topk"),
    Variable("logsumexp", ("layer", "token"), "float32", _NATS, "log of the sum of exponentials of the logits",
             "log(sum_v exp(z_v)) over the full vocabulary; " + _Z, "logsumexp"),
    Variable("entropy", ("layer", "token"), "float32", _NATS, "entropy of the predicted distribution",
             "-sum_v p_v log(p_v), p = softmax(z), over the full vocabulary", "entropy"),
    Variable("target_id", ("token",), "int32", "1", "id of the next token",
             "input_id of the next position of the same sequence", "target", -1),
    Variable("target_rank", ("layer", "token"), "int32", "1", "rank of the next token",
             "number of v with z_v > z_target over the full vocabulary; 0 is the argmax", "target", -1),
    Variable("target_logit", ("layer", "token"), "float32", _NATS, "logit of the next token",
             "z at target_id; log-probability is target_logit - logsumexp", "target", float("nan")),
    Variable("kl_final", ("layer", "token"), "float32", _NATS, "divergence of this layer from the last",
             "KL(p_final || p_layer) = sum_v p_final_v (log p_final_v - log p_layer_v)", "kl_final"),
    Variable("varentropy", ("layer", "token"), "float32", "nats2", "variance of the surprisal of the prediction",
             "sum_v p_v (log p_v)^2 - entropy^2, p = softmax(z), over the full vocabulary", "varentropy"),
    Variable("renyi2", ("layer", "token"), "float32", _NATS, "Renyi entropy of order 2 of the prediction",
             "-log(sum_v p_v^2), p = softmax(z), over the full vocabulary", "renyi2"),
    Variable("margin", ("layer", "token"), "float32", _NATS, "lead of the largest logit over the second",
             "z of the first of topk_id - z of the second; 0 where they are equal", "margin"),
    Variable("kl_reverse", ("layer", "token"), "float32", _NATS, "divergence of the last layer from this one",
             "KL(p_layer || p_final) = sum_v p_layer_v (log p_layer_v - log p_final_v)", "kl_reverse"),
    Variable("js_final", ("layer", "token"), "float32", _NATS, "Jensen-Shannon divergence of this layer and the last",
             "KL(p_final || m) / 2 + KL(p_layer || m) / 2, m = (p_final + p_layer) / 2; 0 to log 2", "js_final"),
    Variable("final_top1_rank", ("layer", "token"), "int32", "1", "rank of the last layer's first choice",
             "number of v with z_v > z of the last layer's argmax; 0 where this layer agrees", "final_top1", -1),
    Variable("final_top1_logit", ("layer", "token"), "float32", _NATS, "logit of the last layer's first choice",
             "z at the last layer's argmax, ties to the lower id", "final_top1", float("nan")),
    *(variable for offset, ahead in ((0, "the token itself"), (2, "the token after the next"),
                                     (3, "the token three ahead"))
      for variable in (
          Variable(f"target_{offset}_id", ("token",), "int32", "1", f"id of {ahead}",
                   f"input_id {offset} positions ahead in the same sequence", f"target_{offset}", -1),
          Variable(f"target_{offset}_rank", ("layer", "token"), "int32", "1", f"rank of {ahead}",
                   f"number of v with z_v > z at target_{offset}_id; 0 is the argmax", f"target_{offset}", -1),
          Variable(f"target_{offset}_logit", ("layer", "token"), "float32", _NATS, f"logit of {ahead}",
                   f"z at target_{offset}_id", f"target_{offset}", float("nan")))),
    Variable("residual_norm", ("layer", "token"), "float32", "1", "length of the state",
             "Euclidean norm of the residual as captured, before any lens and the final norm", "residual_norm"),
    Variable("cosine_final", ("layer", "token"), "float32", "1", "cosine between the state and the last layer's",
             "h . h_final / (|h| |h_final|) of the residuals as captured; NaN where one has no length", "cosine_final",
             float("nan")),
    Variable("cosine_previous", ("layer", "token"), "float32", "1", "cosine between the state and that a block before",
             "h . h_previous / (|h| |h_previous|) of the residuals as captured, h_previous at layer - 1; NaN before "
             "layer 1 and for what a branch adds", "cosine_previous", float("nan")),
    Variable("marginal", ("layer", "vocab"), "float32", "1", "mean probability of each token",
             "mean of softmax(z) over the rows that are no special tokens and have finite logits; NaN if there is none",
             "marginal", float("nan")),
    Variable("tracked_logit", ("layer", "token", "tracked"), "float32", _NATS, "logits of the tracked tokens",
             "z at tracked_id", "tracked"),
    Variable("tracked_rank", ("layer", "token", "tracked"), "int32", "1", "ranks of the tracked tokens",
             "number of v with z_v > z at tracked_id; 0 is the argmax", "tracked"),
    Variable("set_mass", ("layer", "token", "set"), "float32", "1", "probability of the token sets",
             "sum of softmax(z) over the tokens of the set", "token_sets"),
    Variable("answer_logit", ("layer", "token"), "float32", _NATS, "logit of the document's answer",
             "z at answer_id of the token's document", "answer", float("nan")),
    Variable("answer_rank", ("layer", "token"), "int32", "1", "rank of the document's answer",
             "number of v with z_v > z at answer_id of the token's document; 0 is the argmax", "answer", -1),
    Variable("answer_id", ("document",), "int32", "1", "id of the document's answer",
             "first token of the answer column, with read.answer_prefix before it", "answer", -1),
    Variable("answer_length", ("document",), "int32", "1", "number of tokens in the document's answer",
             "tokens of the whole answer; where it is more than 1, answer_id stands for its beginning", "answer"),
)  # fmt: skip

COORDINATES: tuple[Variable, ...] = (
    Variable("layer", ("layer",), "float64", "1", "depth in the residual stream",
             "number of blocks applied: 0 is the input of the first block, the last enters the final norm"),
    Variable("lens", ("lens",), "str", "1", "lens with which the states are read",
             "logit, or the name of its file or folder; a dimension in front of layer where there are several"),
    Variable("site", ("layer",), "str", "1", "place in the model where the state is read",
             "resid_pre.i is the input of block i, resid_post.i its output, resid_mid.i the state between "
             "attention and MLP; attn_out.i and mlp_out.i are what these add to the stream"),
    Variable("k", ("k",), "int32", "1", "place in the top-k", "0 is the largest logit"),
    Variable("input_id", ("token",), "int32", "1", "id of the token at this position", "as fed to the model"),
    Variable("document", ("token",), "int32", "1", "number of the token's document",
             "index along the dimension document"),
    Variable("position", ("token",), "int32", "1", "position of the token in its document",
             "counted from 0 over the document's tokens, the special ones included"),
    Variable("sequence", ("token",), "int32", "1", "number of the token's sequence in its document",
             "a sequence is a window of the document that the model sees in one piece"),
    Variable("is_special", ("token",), "bool", "1", "whether the token is one of the tokenizer's special tokens",
             "BOS, EOS, chat markers and the like, as the tokenizer declares them"),
    Variable("document_length", ("document",), "int32", "1", "number of rows of the document along token",
             "CF contiguous ragged array: the rows of document j follow those of document j - 1"),
    Variable("tracked", ("tracked",), "str", "1", "tracked token", "its string in the vocabulary"),
    Variable("tracked_id", ("tracked",), "int32", "1", "id of the tracked token", "as the tokenizer numbers it"),
    Variable("set", ("set",), "str", "1", "token set", "its name in the file of read.token_sets"),
    Variable("vocab_token", ("vocab",), "str", "1", "vocabulary table: the string of each token id",
             "the id decoded alone; ids beyond the tokenizer, which the model's unembedding still has, are empty"),
)  # fmt: skip

BY_NAME = {variable.name: variable for variable in VARIABLES + COORDINATES}


def variables_of(measures: frozenset[str]) -> tuple[Variable, ...]:
    """List the data variables that a set of measures brings, `tracked` and `answer` included."""
    return tuple(variable for variable in VARIABLES if variable.measure in measures)
