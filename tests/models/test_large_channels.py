"""One channel far larger than the others, as trained models have: it hides nothing from the gate nor inside blocks."""

from typing import Any

import pytest
import torch

from lenspipe.errors import GateError, ModelError
from lenspipe.grid import Site
from lenspipe.models.lens_model import open_model
from tests.families.tiny import build

IDS = torch.tensor([[5, 17, 33, 88, 41, 9, 60, 12, 77, 30, 21, 64, 3, 52, 90, 46]])


def with_large_channel(family: str, size: float, dtype: torch.dtype) -> Any:
    model = build(family, dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 7] = size
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "granite", "mixtral"])
@pytest.mark.parametrize("size", [30.0, 300.0])
def test_branches_in_bfloat16_are_those_of_float32(family: str, size: float) -> None:
    opened = [open_model(with_large_channel(family, size, dtype)) for dtype in (torch.float32, torch.bfloat16)]
    names = [
        [(type(b.middle), type(b.attention and b.attention.module), type(b.mlp and b.mlp.module)) for b in m.branches]
        for m in opened
    ]
    assert names[0] == names[1]
    factors = [[b.mlp.factor for b in m.branches if b.mlp] for m in opened]
    assert factors[0] == pytest.approx(factors[1], rel=2e-3)


@pytest.mark.parametrize("size", [1e3, 1e4, 3e4])
def test_a_large_channel_is_no_reason_to_leave_the_norm_out(size: float) -> None:
    model = with_large_channel("llama", size, torch.bfloat16)
    try:
        opened = open_model(model)
    except (GateError, ModelError):
        return  # rounded beyond what a proof can tell
    assert opened.gate.chain == ("LlamaRMSNorm",)
    vector = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        theirs = model.lm_head(model.model.norm(vector)).float()
    torch.testing.assert_close(opened.unembed.logits(vector), theirs, rtol=0, atol=1e-2 * float(theirs.abs().max()))


def test_a_float16_model_with_a_large_channel_does_not_overflow_the_gate() -> None:
    opened = open_model(with_large_channel("gpt2", 1000.0, torch.float16))
    assert opened.gate.amplified_difference <= 1e-3


def test_a_model_whose_rotary_embedding_switches_at_a_length_runs_rows_of_one_length() -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 12,
    }  # fmt: skip
    config = build("phi3").config
    model = type(build("phi3"))(
        type(config)(**{**config.to_dict(), "rope_parameters": rope, "original_max_position_embeddings": 12})
    ).eval()
    opened = open_model(model)
    assert not opened.gate.pads
    both, mask = torch.cat([IDS, IDS.flip(1), IDS.roll(3)]), torch.ones(3, 16, dtype=torch.int64)
    mask[1, 8:], both[1, 8:] = 0, 0
    site = Site("resid_post", 3)
    together = opened.states(both, mask, [site])[site]
    seen: list[torch.Tensor] = []
    hook = model.model.layers[3].register_forward_hook(lambda _m, _a, out: seen.append(out))
    with torch.no_grad():
        for row, length in ((0, 16), (1, 8), (2, 16)):
            model(both[row : row + 1, :length], use_cache=False)
            torch.testing.assert_close(together[row, :length], seen[-1][0], rtol=1e-4, atol=1e-5)
        model(both, attention_mask=mask, use_cache=False)
    hook.remove()
    assert (seen[-1][1, :8] - together[1, :8]).abs().max() > 1e-2
