"""The real model against values that two other programs computed (tests/reference/README.md), and against itself."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lenspipe.grid import Site, select_sites
from lenspipe.kernels.head import Request
from lenspipe.kernels.readout import read_rows
from lenspipe.models.facts import read_facts
from lenspipe.models.gguf import convert
from lenspipe.models.lens_model import LensModel, load_model
from lenspipe.recipe import make_recipe

pytestmark = pytest.mark.slow
LAYERS = 30
REQUEST = Request(frozenset({"topk", "logsumexp", "entropy", "target"}), 10)


@cache
def load(path: Path) -> LensModel:
    convert(path, print)
    recipe = make_recipe({"model": {"source": str(path)}, "corpus": {"source": "none"}, "run": {"device": "cpu"}})
    return load_model(recipe, read_facts(recipe))


@pytest.fixture(scope="module")
def model(smollm2: Path) -> LensModel:
    return load(smollm2)


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    with np.load(Path(__file__).parent / "reference/smollm2.npz", allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def readout(model: LensModel, residual: Any, target: Any = None) -> dict[str, np.ndarray]:
    state = torch.as_tensor(residual)
    ids = torch.full((len(state),), -1) if target is None else torch.as_tensor([*target, -1])
    head = model.unembed.head
    found = read_rows(head, model.unembed.normed(state)[None], REQUEST, {"target": ids})
    return {name: values[0].numpy() for name, values in found.items()}


def states(model: LensModel, ids: np.ndarray) -> list[torch.Tensor]:
    sites = select_sites(None, None, LAYERS)
    tokens = torch.as_tensor(ids.astype(np.int64))[None]
    found = model.states(tokens, torch.ones_like(tokens), sites)
    return [found[site][0] for site in sites]


def assert_same_top(
    ids: np.ndarray, logits: np.ndarray, their_ids: np.ndarray, their_logits: np.ndarray, tolerance: float
) -> None:
    """Sorted logits agree, and ids agree wherever no neighbour is nearer than the tolerance."""
    np.testing.assert_allclose(logits, their_logits, rtol=0, atol=tolerance)
    gap = np.abs(np.diff(their_logits, axis=-1)) > 2 * tolerance
    clear = np.concatenate([np.ones_like(gap[..., :1]), gap], -1) & np.concatenate(
        [gap, np.zeros_like(gap[..., :1])], -1
    )
    np.testing.assert_array_equal(ids[clear], their_ids[clear])
    assert clear.mean() > 0.8


def test_the_gate_passes_the_real_model(model: LensModel) -> None:
    assert model.gate.difference <= 1e-5
    assert model.gate.chain == ("LlamaRMSNorm",)


def test_readouts_of_stored_residuals_agree_with_float64(model: LensModel, reference: dict[str, Any]) -> None:
    for layer in range(LAYERS + 1):
        found = readout(model, reference["a_resid_f32"][layer], reference["a_next_ids"])
        theirs = reference["a_f64_top_ids"][layer, :, :10], reference["a_f64_top_logits"][layer, :, :10]
        assert_same_top(found["topk_id"], found["topk_logit"], *theirs, 5e-4)
        np.testing.assert_allclose(found["entropy"], reference["a_f64_entropy"][layer], rtol=0, atol=1e-4)
        np.testing.assert_allclose(found["target_logit"][:-1], reference["a_f64_next_logit"][layer], rtol=0, atol=5e-4)
        wrong = found["target_rank"][:-1] != reference["a_f64_next_rank"][layer]
        assert wrong.mean() < 0.1
        assert np.abs(found["target_rank"][:-1] - reference["a_f64_next_rank"][layer]).max() <= 2


def test_states_and_readouts_agree_with_transformerlens(model: LensModel, reference: dict[str, Any]) -> None:
    for layer, state in enumerate(states(model, reference["a_ids"])):
        found = readout(model, state, reference["a_next_ids"])
        assert_same_top(
            found["topk_id"], found["topk_logit"], reference["a_top_ids"][layer], reference["a_top_logits"][layer], 2e-3
        )
        np.testing.assert_allclose(found["entropy"], reference["a_entropy"][layer], rtol=0, atol=1e-3)
        log_prob = (found["target_logit"] - found["logsumexp"])[:-1]
        np.testing.assert_allclose(log_prob, reference["a_next_logprob"][layer], rtol=0, atol=2e-3)


@pytest.mark.parametrize("prompt", ["p0_nobos", "p0_bos", "p1_nobos", "p1_bos"])
def test_states_and_readouts_agree_with_interp_engine(model: LensModel, reference: dict[str, Any], prompt: str) -> None:
    name = f"b_{prompt}_"
    found_states = states(model, reference[name + "token_ids"])
    for layer, state in enumerate(found_states):
        found = readout(model, state)
        if layer == 0:
            theirs = reference[name + "embed_top_ids"], reference[name + "embed_top_logits"]
        else:
            theirs = reference[name + "top_ids"][layer - 1], reference[name + "top_logits"][layer - 1]
            np.testing.assert_allclose(found["logsumexp"], reference[name + "logsumexp"][layer - 1], rtol=0, atol=2e-3)
        assert_same_top(found["topk_id"], found["topk_logit"], *theirs, 2e-3)
    final = readout(model, found_states[-1])
    theirs = reference[name + "model_top_ids"], reference[name + "model_top_logits"]
    assert_same_top(final["topk_id"], final["topk_logit"], *theirs, 2e-3)


def test_a_padded_batch_of_the_real_model_equals_each_row_alone(model: LensModel) -> None:
    ids = torch.tensor([[504, 3575, 282, 4649, 314], [504, 2004, 0, 0, 0]])
    mask = torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    site = Site("resid_post", LAYERS - 1)
    together = model.unembed.logits(model.states(ids, mask, [site])[site][1, :2])
    alone = model.unembed.logits(model.states(ids[1:, :2], mask[1:, :2], [site])[site][0])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-3)
