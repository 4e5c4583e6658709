"""Measure what the recipe's `precision` changes: `python benchmarks/precision.py [--documents 24]`.

One bfloat16 model, the states of every layer, read in three ways: `model` (the final norm's result rounded to
bfloat16, logits kept in float32), `float32` (nothing rounded after the last block), and as the model itself ends
(logits rounded to bfloat16). Truth is float64 on the same states. Last, the same texts through the model in float32.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from lenspipe.grid import select_sites
from lenspipe.models.lens_model import LensModel
from lenspipe.models.unembed import Unembed

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "data/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def float64_logits(unembed: Unembed, states: torch.Tensor) -> torch.Tensor:
    """The lens in float64: RMS norm written out, then the product."""
    norm = unembed.chain[0]
    wide = states.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight.double()
    return normed @ unembed.head.weight_VD.double().T


def measures(logits: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Log-probability and rank of the target, entropy, top-10 ids; in float64 from whatever logits."""
    logprob = logits.double().log_softmax(-1)
    own = logits.gather(1, target[:, None])
    return {
        "log-probability of the next token (nats)": logprob.gather(1, target[:, None])[:, 0],
        "entropy (nats)": -(logprob.exp() * logprob).sum(-1),
        "rank": (logits > own).sum(1),
        "top10": logits.topk(10).indices,
    }


@torch.no_grad()
def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=24)
    count = parser.parse_args().documents
    lines = (ROOT / "data/corpora/recall.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    texts = [json.loads(line)["text"] for line in lines]
    half, full = (LensModel.load(MODEL, dtype=dtype, device="cpu") for dtype in ("bfloat16", "float32"))
    sites = select_sites(None, None, half.facts.n_blocks)
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    for text in texts:
        ids = half.to_tokens(text)
        states, wide = (m.states(ids[None], torch.ones_like(ids)[None], sites) for m in (half, full))
        target = ids[1:]
        for site in sites:
            rows = states[site][0, :-1]
            truth = measures(float64_logits(half.unembed, rows), target)
            plain = half.unembed.logits(rows)
            readers = {
                "`model`": plain,
                "`float32`": half.unembed.at("float32").logits(rows),
                "logits rounded to bfloat16": plain.bfloat16().float(),
                "the model run in float32": full.unembed.logits(wide[site][0, :-1]),
            }
            for name, logits in readers.items():
                ours = measures(logits, target)
                found.setdefault(name, []).append(
                    {
                        **{key: (ours[key] - truth[key]).abs().numpy() for key in truth if "nats" in key},
                        "rank": (ours["rank"] != truth["rank"]).double().numpy(),
                        "top10": (ours["top10"] != truth["top10"]).any(1).double().numpy(),
                    }
                )
    rows = sum(len(item["rank"]) for item in found["`model`"])
    print(f"SmolLM2-135M-Instruct in bfloat16, {len(texts)} texts, {rows:,} (layer, token) rows; against float64\n")
    print("| read as | log-prob, mean | log-prob, largest | entropy, mean | entropy, largest | ranks that differ | "
          "top-10 that differ |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    for name, items in found.items():
        together = {key: np.concatenate([item[key] for item in items]) for key in items[0]}
        cells = [f"{f(values):.1e}" for key, values in together.items() if "nats" in key for f in (np.mean, np.max)]
        cells += [f"{together[key].mean():.1%}" for key in ("rank", "top10")]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
