"""The readout against the bare matrix product of the same operands, and against others. `make bench`.

Four heads, random weights: what is multiplied does not matter to how long it takes. The floor is torch.mm into an array
that is there already, in the operands' own dtype: its bfloat16 results are rounded, ours are float32.
"""

import argparse
from collections.abc import Iterator

import torch

from benchmarks.measure import Row, ratio, report
from lenspipe.kernels import marginal, plain
from lenspipe.kernels.head import Arithmetic, Head, Request
from lenspipe.kernels.product import Product, choose_product
from lenspipe.kernels.readout import read_rows, way
from lenspipe.variables import DEFAULT_MEASURES, MEASURES

HEADS = {
    "576 x 49,152 (SmolLM2)": (576, 49152, Arithmetic()),
    "768 x 50,257 (GPT-2)": (768, 50257, Arithmetic()),
    "2,048 x 128,256 (Llama 3)": (2048, 128256, Arithmetic()),
    "2,304 x 256,000 (Gemma)": (2304, 256000, Arithmetic(softcap=30.0)),
}
MINIMAL = frozenset({"target"})
AGAINST_FINAL = frozenset({"kl_final", "kl_reverse", "js_final", "final_top1"})
DEFAULT = frozenset(DEFAULT_MEASURES)
OF_STATES = frozenset({"residual_norm", "cosine_final", "cosine_previous"})
ALL = frozenset(MEASURES) - OF_STATES - {"marginal"}
DTYPES = (torch.float32, torch.bfloat16)


class Operands:
    """A head, states at some places, and where the floor puts its product."""

    def __init__(self, name: str, dtype: torch.dtype, n_rows: int, n_places: int = 1) -> None:
        width, vocab, arithmetic = HEADS[name]
        draw = torch.Generator().manual_seed(0)
        self.head = Head((torch.randn(vocab, width, generator=draw) * 0.1).to(dtype), None, arithmetic)
        self.states = torch.randn(n_places, n_rows, width, generator=draw).to(dtype)
        ids = torch.randint(0, vocab, (n_rows,), generator=draw)
        self.asked = dict.fromkeys(("target", "target_0", "target_2", "target_3"), ids)
        self.out = torch.empty(n_rows, vocab, dtype=dtype)

    def product(self) -> None:
        for states in self.states:
            torch.mm(states, self.head.weight_VD.T, out=self.out)

    def read(self, measures: frozenset[str]) -> None:
        asked = {name: ids for name, ids in self.asked.items() if name in measures}
        final = len(self.states) - 1 if measures & AGAINST_FINAL else None
        read_rows(self.head, self.states, Request(measures, 10), asked, final)

    def by_torch(self) -> None:
        """Read as one writes it down: whole rows of logits, a few hundred rows at once."""
        for states in self.states:
            for start in range(0, len(states), 256):
                logits = (states[start : start + 256] @ self.head.weight_VD.T).float()
                self.head.arithmetic.apply_(logits)
                ids = self.asked["target"][start : start + 256, None]
                logprobs = logits.log_softmax(-1)
                logits.topk(10)
                target = logits.gather(1, ids)
                (logits > target).sum(-1)
                (logprobs.exp() * logprobs).sum(-1)
                logits.logsumexp(-1)


def heads(pairs: int) -> Iterator[list[object]]:
    """Every head and dtype; measures minimal, default at one place without and 30 with kl_final; torch; plain."""
    for name, (width, vocab, _) in HEADS.items():
        for dtype in DTYPES:
            n_rows = 1024 if vocab < 100_000 else 512 if width < 2304 else 256
            given = Operands(name, dtype, n_rows)
            found = [ratio(lambda m=m: given.read(m), given.product, pairs) for m in (MINIMAL, DEFAULT - AGAINST_FINAL)]
            torch_way = ratio(given.by_torch, given.product, pairs)
            yield [name, str(dtype).removeprefix("torch."), way(given.head, dtype), n_rows, *found, torch_way]


def measures(pairs: int, n_places: int) -> Iterator[Row]:
    """What each measure adds to target alone, at some places, in bare products: its price."""
    given = Operands(next(iter(HEADS)), torch.float32, 256, n_places)
    base = ratio(lambda: given.read(MINIMAL), given.product, pairs)
    yield "target alone", base
    for name in MEASURES:
        if name in ALL - MINIMAL:
            yield name, ratio(lambda: given.read(MINIMAL | {name}), given.product, pairs) - base
    lse, counted = torch.full(given.states.shape[:2], 10.0), torch.ones(given.states.shape[1], dtype=torch.bool)
    again = ratio(lambda: marginal.add_up(given.head, given.states, lse, counted), given.product, pairs)
    yield "marginal, beside logsumexp", again
    yield "the default", ratio(lambda: given.read(DEFAULT), given.product, pairs)
    yield "the default without kl_final", ratio(lambda: given.read(DEFAULT - AGAINST_FINAL), given.product, pairs)
    yield "all but marginal", ratio(lambda: given.read(ALL), given.product, pairs)


def growth(pairs: int) -> Iterator[Row]:
    """Rows, places and threads."""
    name = next(iter(HEADS))
    for n_rows in (16, 64, 256, 1024, 4096, 16384):
        given = Operands(name, torch.float32, n_rows)
        yield (
            f"{n_rows:,} rows / bare product of them",
            ratio(lambda: given.read(DEFAULT - AGAINST_FINAL), given.product, pairs),
        )
    given = Operands(name, torch.float32, 256, 30)
    without, with_kl = (lambda m=m: given.read(m) for m in (DEFAULT - AGAINST_FINAL, DEFAULT))
    yield "kl_final on top of the default, 30 layers", ratio(with_kl, without, pairs) - 1
    n_threads = torch.get_num_threads()

    def with_threads(n: int) -> None:
        torch.set_num_threads(n)
        given.read(DEFAULT)

    yield f"1 thread / {n_threads} threads", ratio(lambda: with_threads(1), lambda: with_threads(n_threads), pairs)
    for k in (1, 10, 100, 1000):
        request, few = Request(frozenset({"topk"}), k), Operands(name, torch.float32, 512)
        yield (
            f"top-{k} alone / bare product",
            ratio(lambda: read_rows(few.head, few.states, request, {}), few.product, pairs),
        )
    yield (
        "without numba: the default / bare product",
        ratio(
            lambda: plain.read_rows(few.head, few.states, Request(DEFAULT, 10), {"target": few.asked["target"]}, 0),
            few.product,
            pairs,
        ),
    )


def split(pairs: int) -> Iterator[Row]:
    """Float32 operands as sums of two bfloat16 ones, in three products: their time, and what they lose."""
    low, high = (choose_product(dtype, dtype, 576) for dtype in (torch.bfloat16, torch.float32))
    if low.way != "oneDNN bfloat16":
        return
    draw = torch.Generator().manual_seed(0)
    weight, states = torch.randn(8192, 576, generator=draw) * 0.1, torch.randn(128, 576, generator=draw)
    parts = []
    for whole in (weight, states):
        upper = whole.bfloat16()
        parts.append((upper, (whole - upper.float()).bfloat16()))
    tile, total = torch.empty(256, 128), torch.zeros(8192, 128)

    def by(product: Product, pieces: list[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor | None = None) -> None:
        for rows, laid_out in [(rows, product.lay_out(columns)) for rows, columns in pieces]:
            for start in range(0, len(rows), 256):
                product.into(tile, rows[start : start + 256], laid_out)
                if out is not None:
                    out[start : start + 256] += tile

    (w1, w2), (s1, s2) = parts
    three = [(w1, s1), (w1, s2), (w2, s1)]
    yield (
        "three bfloat16 products / one float32 product",
        ratio(lambda: by(low, three), lambda: by(high, [(weight, states)]), pairs),
    )
    exact = weight.double() @ states.double().T
    by(low, three, total)
    lost = (total - exact).abs().max().item()
    total.zero_()
    by(high, [(weight, states)], total)
    yield "their largest error / that of float32", lost / (total - exact).abs().max().item()


def main() -> None:
    """Measure, print, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    pairs = parser.parse_args().pairs
    command = "python -m benchmarks.readout"
    header = ["head", "dtype", "kernel", "rows", "target / product", "default / product", "by torch / product"]
    report("Readout", command, header, list(heads(pairs)))
    report("Readout growth", command, ["figure", "value"], [*growth(pairs), *split(pairs)])
    report("Readout measures", command, ["measure", "bare products"], list(measures(pairs, 10)))


if __name__ == "__main__":
    main()
