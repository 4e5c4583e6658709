"""Vectors: anything of the model's width read as predictions, in memory: residuals, what a head adds, directions.

Row: one vector of width D; L is the shape of all rows, R their number. V: vocabulary. K: tokens read in each row.
Which token's values are read is a selector's word: the k largest, tokens that all rows share, or one of each row.
Knows nothing of recipes, stores and datasets.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lenspipe.errors import RequestError
from lenspipe.kernels import plain
from lenspipe.kernels import readout as kernel
from lenspipe.kernels.head import Arithmetic, Request
from lenspipe.models.lens_model import LensModel
from lenspipe.models.tokenizer import Tokenizer
from lenspipe.models.unembed import Unembed
from lenspipe.readouts import Readout

Tokens = str | int | Sequence[str | int] | Tensor | np.ndarray
Values = Literal["logits", "log_probs", "probs"]

SORT_FROM = 32
"""Tokens in a row from which one sort of its logits is faster than counting the larger ones for each."""


def readout(
    unembed: Unembed | LensModel,
    vectors: Tensor | np.ndarray,
    *,
    top_k: int | None = None,
    targets: Tokens | None = None,
    row_targets: Tensor | np.ndarray | Sequence[Any] | int | None = None,
    vocab: Tokens | None = None,
    values: Values = "logits",
    apply_norm: bool = True,
    raw: bool = False,
    grad: bool = False,
    memory: int = 2**30,
    tokenizer: Any = None,
) -> Readout:
    """Read vectors by the model's own final norm, unembedding and logit arithmetic.

    Exactly one of `top_k`, `targets`, `row_targets` and `vocab` says which tokens to read; ranks, entropy,
    logsumexp and the probabilities' normaliser are over the full vocabulary whichever it is.

    Args:
        unembed: a LensModel, or its `unembed`, whose precision is then as it was asked for.
        vectors: [*L, d_model], floating point; read in the model's dtype, as its own states are.
        top_k: 1 to V: the k largest logits of each row, in order, ties to the lower id.
        targets: tokens that all rows share, by id or by string: one, a list, or an integer tensor of 0 or 1 dimensions.
        row_targets: integers that broadcast to L, aligned at the right as numpy does: [L] or, of vectors
            [batch, position, d_model], [position] or [batch, 1]. One token in each row, K = 1; -1 where there is none.
        vocab: a part of the vocabulary, given as targets are, each token once.
        values: what the values are: logits, log_probs or probs.
        apply_norm: False for vectors that the final norm has seen already, or that are not to be normed.
        raw: leave the family's scale and softcap out.
        grad: let gradients reach the vectors; the model stays frozen. All rows are then in memory at once.
        memory: bytes that blocks of logits may take.
        tokenizer: a transformers tokenizer, for strings; by default the LensModel's.

    Returns:
        A Readout. A row whose vector or logits hold NaN or +inf has rank -1 and NaN throughout, and, of top_k, id -1.

    Raises:
        RequestError: an argument that cannot be; nothing has been computed then.
    """
    model, speller = _opened(unembed, tokenizer)
    if values not in get_args(Values):
        raise RequestError(f"values is {values!r}: it must be one of {', '.join(get_args(Values))}")
    flat_RD = model.flat(_floats(vectors), apply_norm)
    if not len(flat_RD):
        raise RequestError(f"vectors have shape {tuple(vectors.shape)}: there is no row to read")
    _check_grad(flat_RD, grad)
    shape, n_vocab = tuple(vectors.shape[:-1]), model.head.vocab_size
    _only_one(top_k=top_k, targets=targets, row_targets=row_targets, vocab=vocab)
    k, ids, ids_RK = 1, None, None
    if top_k is not None:
        k = _count(top_k, n_vocab)
    elif row_targets is not None:
        ids_RK = _row_ids(row_targets, shape, n_vocab)[:, None]
        ids = ids_RK.reshape((*shape, 1))
    else:
        ids = _shared_ids("targets", targets, n_vocab, speller) if vocab is None else _subset(vocab, n_vocab, speller)
        k, ids_RK = len(ids), ids.expand(len(flat_RD), -1)
    rows = _Rows(model, flat_RD, ids_RK, k, values, apply_norm, raw)
    found = rows.whole(slice(None)) if grad else rows.in_blocks(_bytes(memory))
    found = {name: value.reshape((*shape, *value.shape[1:])) for name, value in found.items()}
    if ids is not None:
        found["ids"] = ids.to(found["values"].device)
    return Readout(**found, kind=values, tokenizer=speller)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to read, and how: the arguments of `readout`, checked.

    Attributes:
        ids_RK: int64, the tokens to read, -1 for none; None for the k largest.
    """

    model: Unembed
    flat_RD: Tensor
    ids_RK: Tensor | None
    k: int
    values: Values
    apply_norm: bool
    raw: bool

    def in_blocks(self, memory: int) -> dict[str, Tensor]:
        """Read the rows block by block; `ids` are found where they were not given."""
        by_sorting = self.ids_RK is not None and self.k >= SORT_FROM
        way = plain if by_sorting else kernel.way_of(self.model.head.weight_VD.device)
        n_at_once = kernel.rows_per_block(memory, self.model.head, 1, "memory", way)
        n_rows, device = len(self.flat_RD), self.model.head.weight_VD.device
        # Made beforehand: small results that are allocated between large blocks scatter the memory.
        found = {
            "values": torch.empty(n_rows, self.k, device=device),
            "ranks": torch.empty(n_rows, self.k, dtype=torch.int32, device=device),
            "entropy": torch.empty(n_rows, device=device),
            "logsumexp": torch.empty(n_rows, device=device),
        }
        if self.ids_RK is None:
            found["ids"] = torch.empty(n_rows, self.k, dtype=torch.int64, device=device)
        with torch.no_grad():
            for start in range(0, n_rows, n_at_once):
                part = slice(start, start + n_at_once)
                for name, value in (self.whole(part) if by_sorting else self.asked(part)).items():
                    found[name][part] = value
        return found

    def asked(self, part: slice) -> dict[str, Tensor]:
        """Read some rows at once, each with few tokens asked for."""
        normed_RD = self.model.rows(self.flat_RD[part], self.apply_norm)
        head = replace(self.model.head, arithmetic=Arithmetic()) if self.raw else self.model.head
        measures = frozenset({"logsumexp", "entropy", "logprob", *([] if self.ids_RK is not None else ["topk"])})
        columns = [] if self.ids_RK is None else self.ids_RK[part].to(normed_RD.device).unbind(1)
        asked = {str(i): id_R.contiguous() for i, id_R in enumerate(columns)}
        found = kernel.read_rows(head, normed_RD[None], Request(measures, self.k), asked)
        found = {name: value[0] for name, value in found.items()}
        lse_R, entropy_R = found["logsumexp"], found["entropy"]
        if self.ids_RK is None:
            logit_RK, logprob_RK = found["topk_logit"], found["topk_logprob"]
            # Whatever is larger than one of the k is among the k.
            ranks_RK = torch.searchsorted(-logit_RK, -logit_RK)
        else:
            logit_RK, logprob_RK, ranks_RK = (
                torch.stack([found[f"{name}_{what}"] for name in asked], dim=1) for what in ("logit", "logprob", "rank")
            )
        values_RK = {"logits": logit_RK, "log_probs": logprob_RK, "probs": logprob_RK.exp()}[self.values]
        # The vector is looked at too: a softcap makes plain numbers of an infinite one.
        broken_R = ~(torch.isfinite(self.flat_RD[part].float()).all(dim=1).to(lse_R.device) & torch.isfinite(lse_R))
        read = {
            "values": values_RK.masked_fill(broken_R[:, None], torch.nan),
            "ranks": ranks_RK.to(torch.int32).masked_fill(broken_R[:, None], -1),
            "entropy": entropy_R.masked_fill(broken_R, torch.nan),
            "logsumexp": lse_R.masked_fill(broken_R, torch.nan),
        }
        if self.ids_RK is None:
            read["ids"] = found["topk_id"].long().masked_fill(broken_R[:, None], -1)
        return read

    def whole(self, part: slice) -> dict[str, Tensor]:
        """Read some rows at once from all their logits: with gradients, or for many tokens of each row."""
        logits_RV = self.model.logits(self.flat_RD[part], self.raw, self.apply_norm)
        plain_RV, device = logits_RV.detach(), logits_RV.device
        if self.ids_RK is None:
            top_RK, best_RK = plain.top_k(plain_RV, self.k)
            ids_RK = best_RK.long()
            # Whatever is larger than one of the k is among the k.
            ranks_RK = torch.searchsorted(-top_RK, -top_RK)
        else:
            ids_RK = self.ids_RK[part].to(device)
            ranks_RK = _ranks(plain_RV, ids_RK.clamp(min=0))
        logprob_RV = logits_RV.log_softmax(dim=1)
        lse_R = logits_RV.amax(dim=1) - logprob_RV.amax(dim=1)
        # The vector is looked at too: a softcap makes plain numbers of an infinite one.
        sound_R = torch.isfinite(self.flat_RD[part].detach().float()).all(dim=1).to(device)
        broken_R = ~(sound_R & torch.isfinite(lse_R.detach()))
        found_RK = (logits_RV if self.values == "logits" else logprob_RV).gather(1, ids_RK.clamp(min=0))
        missing_RK = (ids_RK < 0) | broken_R[:, None]
        found = {
            "values": (found_RK.exp() if self.values == "probs" else found_RK).masked_fill(missing_RK, torch.nan),
            "ranks": ranks_RK.to(torch.int32).masked_fill(missing_RK, -1),
            "entropy": _entropy(logprob_RV).masked_fill(broken_R, torch.nan),
            "logsumexp": lse_R.masked_fill(broken_R, torch.nan),
        }
        return found if self.ids_RK is not None else {**found, "ids": ids_RK.masked_fill(broken_R[:, None], -1)}


def _ranks(logits_RV: Tensor, ids_RK: Tensor) -> Tensor:
    if ids_RK.shape[1] < SORT_FROM:
        return torch.stack([plain.logit_and_rank(logits_RV, id_R)[1] for id_R in ids_RK.unbind(1)], dim=1)
    ascending_RV = logits_RV.sort(dim=1).values
    return logits_RV.shape[1] - torch.searchsorted(ascending_RV, logits_RV.gather(1, ids_RK), right=True)


def _entropy(logprob_RV: Tensor) -> Tensor:
    if not logprob_RV.requires_grad:
        return -plain.expectation(logprob_RV.exp(), logprob_RV)
    return -(logprob_RV.exp() * logprob_RV.masked_fill(logprob_RV == -torch.inf, 0)).sum(dim=1)


def _opened(unembed: Any, tokenizer: Any) -> tuple[Unembed, Tokenizer | None]:
    speller = tokenizer if tokenizer is None or isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
    if isinstance(unembed, LensModel):
        return unembed.unembed, speller or unembed.tokenizer
    if isinstance(unembed, Unembed):
        return unembed, speller
    raise RequestError(f"unembed must be a LensModel or its unembed; found {type(unembed).__name__}: open the model")


def _floats(vectors: Any) -> Tensor:
    if isinstance(vectors, Tensor):
        return vectors
    if not isinstance(vectors, np.ndarray):
        raise RequestError(f"vectors must be a tensor or a numpy array; found {type(vectors).__name__}")
    if vectors.dtype not in (np.float16, np.float32, np.float64):
        raise RequestError(f"vectors must be floating-point numbers, found {vectors.dtype}")
    return torch.from_numpy(np.require(vectors, requirements=["C", "W"]))


def _bytes(memory: Any) -> int:
    if not _is_integer(memory):
        raise RequestError(f"memory is {memory!r}: it must be a whole number of bytes")
    return int(memory)


def _check_grad(flat_RD: Tensor, grad: bool) -> None:
    if grad and not flat_RD.requires_grad:
        raise RequestError("grad=True, but no gradient can reach vectors: call vectors.requires_grad_() before")
    if grad and not torch.is_grad_enabled():
        raise RequestError("grad=True inside torch.no_grad(): leave one of them out")


def _only_one(**selectors: object) -> None:
    given = [name for name, value in selectors.items() if value is not None]
    if len(given) != 1:
        raise RequestError(f"give exactly one of {', '.join(selectors)}; found {' and '.join(given) or 'none'}")


def _count(top_k: Any, n_vocab: int) -> int:
    if not _is_integer(top_k) or not 1 <= top_k <= n_vocab:
        raise RequestError(f"top_k is {top_k!r}: it must be a whole number from 1 to {n_vocab}, the vocabulary")
    return int(top_k)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _integers(name: str, given: Any) -> Tensor:
    try:
        ids = torch.as_tensor(np.array(given) if isinstance(given, np.ndarray) else given)
    except (TypeError, ValueError, RuntimeError):
        raise RequestError(f"{name} must be token ids; found {given!r:.80}") from None
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise RequestError(f"{name} must be integers; found {ids.dtype}")
    return ids.detach().cpu().long()


def _outside(name: str, wrong: int, n_vocab: int, hint: str = "") -> RequestError:
    return RequestError(f"{name}: id {wrong}, but the vocabulary has ids 0 to {n_vocab - 1}{hint}")


def _shared_ids(name: str, given: Any, n_vocab: int, tokenizer: Tokenizer | None) -> Tensor:
    """Find the ids that all rows share: int64 [K]."""
    if isinstance(given, Tensor | np.ndarray):
        tensor = _integers(name, given)
        if tensor.dim() > 1:
            raise RequestError(
                f"{name} are shared by all rows: one id or a list of them; found shape {tuple(tensor.shape)}. "
                "For another token in each row, use row_targets"
            )
        ids = tensor.reshape(-1).tolist()
    else:
        tokens = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
        ids = [_token_id(name, token, n_vocab, tokenizer) for token in tokens]
    if not ids:
        raise RequestError(f"{name} is empty: name at least one token")
    for wrong in (i for i in ids if not 0 <= i < n_vocab):
        raise _outside(name, wrong, n_vocab)
    return torch.tensor(ids)


def _token_id(name: str, token: Any, n_vocab: int, tokenizer: Tokenizer | None) -> int:
    if _is_integer(token):
        return int(token)
    if not isinstance(token, str):
        raise RequestError(f"{name}: a token is an id or a string; found {token!r}")
    if tokenizer is None:
        raise RequestError(f"{name}: {token!r} needs a tokenizer: pass tokenizer=, a LensModel that has one, or ids")
    return tokenizer.single(token, n_vocab)


def _subset(vocab: Any, n_vocab: int, tokenizer: Tokenizer | None) -> Tensor:
    ids = _shared_ids("vocab", vocab, n_vocab, tokenizer)
    for twice in (i for i, count in Counter(ids.tolist()).items() if count > 1):
        raise RequestError(f"vocab names id {twice} more than once: name each token once")
    return ids


def _row_ids(given: Any, shape: tuple[int, ...], n_vocab: int) -> Tensor:
    """Find each row's own id: int64 [R]."""
    ids = _integers("row_targets", given)
    for wrong in ids[(ids < -1) | (ids >= n_vocab)].tolist():
        raise _outside("row_targets", wrong, n_vocab, ", and -1 for none")
    try:
        return ids.broadcast_to(shape).reshape(-1)
    except RuntimeError:
        raise RequestError(
            f"row_targets of shape {tuple(ids.shape)} do not broadcast to the rows, whose shape is {shape}: "
            "dimensions are aligned at the right, and each must be equal or 1"
        ) from None
