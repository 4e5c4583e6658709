"""Readout: what some vectors say of some tokens, as tensors, as a table and at a glance.

Row: one vector; L is the shape of all rows, K the number of tokens read in each.
Computes nothing: `vectors.readout` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from lenspipe.errors import RequestError
from lenspipe.models.tokenizer import Tokenizer

SHOWN_ROWS, SHOWN_COLUMNS = 8, 5
"""How much of a readout is shown at a glance."""


@dataclass(frozen=True, eq=False, repr=False)
class Readout:
    """The measures of vectors of shape [*L, d_model].

    Attributes:
        ids: int64 [K] where all rows share their tokens, else [*L, K]; -1 for none.
        values: float32 [*L, K]: logits, log-probabilities or probabilities, as `kind` says; NaN for none.
        ranks: int32 [*L, K], number of strictly larger logits over the full vocabulary; -1 for none.
        entropy: float32 [*L], nats, over the full vocabulary.
        logsumexp: float32 [*L], nats, over the full vocabulary.
        kind: logits, log_probs or probs.
        tokenizer: spells the ids, where there is one.
    """

    ids: Tensor
    values: Tensor
    ranks: Tensor
    entropy: Tensor
    logsumexp: Tensor
    kind: str
    tokenizer: Tokenizer | None = None

    @property
    def broken(self) -> Tensor:
        """Rows without numbers, whose vector or logits hold NaN or infinity: bool [*L]."""
        return self.logsumexp.isnan()

    @property
    def shape(self) -> tuple[int, ...]:
        """L, the shape of the rows."""
        return tuple(self.logsumexp.shape)

    def tokens(self) -> np.ndarray:
        """Spell the ids: strings, in the shape of `ids`; "" for -1 and for ids that the tokenizer does not have.

        Raises:
            RequestError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError("tokens need a tokenizer to spell them: pass tokenizer= to readout, or use ids")
        return _spelled(self.tokenizer, self.ids.cpu().numpy())

    def to_dataframe(self) -> pd.DataFrame:
        """Lay the readout out, one line for each row and token.

        Columns: dim_0, dim_1 ... (place of the row in L), k (place of the token in the row), token (where there is a
        tokenizer), id, value, rank.
        """
        places = np.indices(self.values.shape).reshape(self.values.dim(), -1)
        columns: dict[str, Any] = {f"dim_{i}": place for i, place in enumerate(places[:-1])}
        columns["k"] = places[-1]
        if self.tokenizer is not None:
            columns["token"] = np.broadcast_to(self.tokens(), self.values.shape).ravel()
        columns["id"] = self.ids.expand(self.values.shape).cpu().numpy().ravel()
        columns["value"] = self.values.detach().cpu().numpy().ravel()
        columns["rank"] = self.ranks.cpu().numpy().ravel()
        return pd.DataFrame(columns)

    def __repr__(self) -> str:
        header, lines = self._table()
        widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
        shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in [header, *lines]]
        return "\n".join([self._caption(), *shown, *self._left_out()])

    def _repr_html_(self) -> str:
        header, lines = self._table()
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
        foot = "".join(f"<p>{escape(line)}</p>" for line in self._left_out())
        return (
            f'<table style="white-space: pre"><caption>{escape(self._caption())}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{foot}"
        )

    def _caption(self) -> str:
        n_rows, n_tokens, n_broken = self.logsumexp.numel(), self.values.shape[-1], int(self.broken.sum())
        caption = f"Readout {list(self.shape)} x {n_tokens}: {self.kind}, #rank; entropy in nats"
        if not n_broken:
            return caption
        return f"{caption}; {n_broken} of {n_rows} rows broken: NaN or infinity in the vector or its logits"

    def _left_out(self) -> Sequence[str]:
        n_rows, n_tokens = self.logsumexp.numel() - SHOWN_ROWS, self.values.shape[-1] - SHOWN_COLUMNS
        more = [f"{n} more {name}" for n, name in [(n_rows, "rows"), (n_tokens, "tokens in each row")] if n > 0]
        return [f"... and {', and '.join(more)}"] if more else []

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Header and lines of what is shown: a shared token heads its column, others stand in their cells."""
        n_rows = min(self.logsumexp.numel(), SHOWN_ROWS)
        n_tokens = min(self.values.shape[-1], SHOWN_COLUMNS)
        rows = {
            name: value.detach().reshape(-1, self.values.shape[-1])[:n_rows, :n_tokens].cpu().numpy()
            for name, value in [("value", self.values), ("rank", self.ranks), ("id", self.ids)]
        }
        shared = self.ids.dim() == 1 and self.values.dim() > 1
        names = self._names(rows["id"])
        entropy = self.entropy.detach().reshape(-1)[:n_rows].tolist()
        lines = []
        for i in range(n_rows):
            place = [int(index) for index in np.unravel_index(i, self.shape)]
            figures = zip(rows["value"][i], rows["rank"][i], strict=True)
            cells = [f"{value:.4g} #{rank}" if rank >= 0 else "-" for value, rank in figures]
            if not shared:
                cells = [f"{name} {cell}".lstrip() for name, cell in zip(names[i], cells, strict=True)]
            lines.append([str(place), f"{entropy[i]:.3f}", *cells])
        return ["row", "entropy", *(names[0] if shared else map(str, range(n_tokens)))], lines

    def _names(self, ids: np.ndarray) -> list[list[str]]:
        """Name ids: their string in quotes, so that spaces show; the number where there is none; nothing for -1."""
        spelled = np.full(ids.shape, "", dtype=object) if self.tokenizer is None else _spelled(self.tokenizer, ids)
        return [
            [repr(name) if name else str(number) if number >= 0 else "" for name, number in zip(*line, strict=True)]
            for line in zip(spelled.tolist(), ids.tolist(), strict=True)
        ]


def _spelled(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    found, place = np.unique(ids, return_inverse=True)
    known = [[int(i)] for i in found if 0 <= i < len(tokenizer.hf)]
    names = tokenizer.hf.batch_decode(known, clean_up_tokenization_spaces=False) if known else []
    spelled = np.full(len(found), "", dtype=object)
    spelled[(found >= 0) & (found < len(tokenizer.hf))] = names
    return spelled[place.reshape(ids.shape)]
