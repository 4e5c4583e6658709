"""The readout beside other libraries' on the same rows, in the dtype of the model: `python -m benchmarks.peers`.

Needs `pip install -e '.[bench]'`. Models of one block with random weights: only final norm and unembedding are run.
TransformerLens: `logit_readout(bridge, rows, top_k=10)`. interp-engine: `decode_residuals`, then its `lens_topk`.
All give top-10; lenspipe and TransformerLens give entropy and ranks with it.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig
from transformers.utils import logging

import lenspipe
from benchmarks.measure import ratio, report

TOKENIZER = Path(__file__).parents[1] / "data/tiny-model"
CONFIGS = {
    "576 x 49,152": LlamaConfig(
        hidden_size=576, intermediate_size=64, num_hidden_layers=1, num_attention_heads=9, num_key_value_heads=9,
        vocab_size=49152, tie_word_embeddings=True,
    ),
    "768 x 50,257": GPT2Config(n_layer=1),
}  # fmt: skip


def transformer_lens(hf: Any, folder: str, rows: torch.Tensor) -> Callable[[], object]:
    """Open a model with TransformerLens, and return its readout call."""
    from transformer_lens.model_bridge import TransformerBridge  # noqa: PLC0415 -- optional
    from transformer_lens.tools.analysis.logit_lens import logit_readout  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    bridge = TransformerBridge.boot_transformers(folder, hf_model=hf, tokenizer=tokenizer, device="cpu", dtype=hf.dtype)
    return lambda: logit_readout(bridge, rows, top_k=10)


def interp_engine(hf: Any, folder: str, rows: torch.Tensor) -> Callable[[], object]:
    """Open a model with interp-engine, and return its decode and top-k."""
    from interp_engine.lens import decode_residuals  # noqa: PLC0415 -- optional
    from interp_engine.lens_topk import lens_topk  # noqa: PLC0415
    from interp_engine.model import EagerModel  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = EagerModel(folder, hf_model=hf, tokenizer=tokenizer, device="cpu", dtype=hf.dtype)
    return lambda: lens_topk(decode_residuals(model, rows), top_n=10)


def cases(n_rows: int, pairs: int) -> Iterator[list[object]]:
    """Their time in ours."""
    for name, config in CONFIGS.items():
        for dtype in (torch.float32, torch.bfloat16):
            hf = AutoModelForCausalLM.from_config(config).to(dtype).eval()
            rows = torch.randn(n_rows, config.hidden_size).to(dtype)
            ours = lenspipe.LensModel.of(hf)
            for opened in (transformer_lens, interp_engine):
                with tempfile.TemporaryDirectory() as folder:
                    hf.save_pretrained(folder)
                    theirs = opened(copy.deepcopy(hf), folder, rows)  # which some change
                figure = ratio(theirs, lambda ours=ours, rows=rows: lenspipe.readout(ours, rows, top_k=10), pairs)
                yield [name, str(dtype).removeprefix("torch."), opened.__name__, figure]


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=5)
    asked = parser.parse_args()
    logging.disable_progress_bar()
    header = ["head", "dtype", "library", "its time / lenspipe's"]
    report("Peers", "python -m benchmarks.peers", header, list(cases(asked.rows, asked.pairs)))


if __name__ == "__main__":
    main()
