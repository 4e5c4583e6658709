"""The identity gate: named families pass, and whatever would read wrong numbers is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lenspipe.errors import GateError, ModelError
from lenspipe.grid import Site, select_sites
from lenspipe.models.lens_model import open_model
from lenspipe.models.structure import probe_ids
from tests.models.families import CONFIGS, DEPTH, VOCAB, build, facts

IDS = torch.tensor([[5, 17, 3, 88, 41, 9, 60]])
LAST = Site("resid_post", DEPTH - 1)


def own_logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0].float()


@pytest.mark.parametrize("family", CONFIGS)
def test_the_lens_of_the_last_state_is_the_models_own_logits(family: str) -> None:
    model = build(family)
    opened = open_model(model, facts(family))
    state = opened.states(IDS, torch.ones_like(IDS), [LAST])[LAST][0]
    torch.testing.assert_close(opened.unembed.logits(state), own_logits(model), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_leaving_the_final_norm_out_is_far_off(family: str) -> None:
    model = build(family)
    opened = open_model(model, facts(family))
    norms = [module for module in opened.unembed.chain if "Norm" in type(module).__name__]
    assert len(norms) == (0 if family == "opt_post_norm" else 1)
    state = opened.states(IDS, torch.ones_like(IDS), [LAST])[LAST][0]
    for module in opened.unembed.chain:
        state = module(state) if module not in norms else state
    bare = opened.unembed.head.arithmetic.apply_(state @ opened.unembed.head.weight_VD.T)
    theirs = own_logits(model)
    assert family == "opt_post_norm" or (bare - theirs).abs().max() > 0.1 * theirs.abs().max()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "cohere", "granite", "opt_projected"])
def test_a_half_precision_model_passes_within_its_own_rounding(family: str) -> None:
    opened = open_model(build(family, torch.bfloat16), facts(family, "bfloat16"))
    assert 0 < opened.gate.difference <= 6e-3
    assert opened.unembed.head.weight_VD.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma2", "cohere", "granite", "qwen3", "opt"])
def test_middle_layers_are_the_states_between_blocks(family: str) -> None:
    """hidden_states[i] of transformers is what enters block i, but for the last, which it overwrites."""
    model = build(family)
    opened = open_model(model, facts(family))
    sites = select_sites(None, None, DEPTH)
    states = opened.states(IDS, torch.ones_like(IDS), sites)
    with torch.no_grad():
        theirs = model(IDS, output_hidden_states=True).hidden_states
    for layer in range(DEPTH):
        torch.testing.assert_close(states[sites[layer]], theirs[layer])


def test_input_and_output_sites_of_neighbouring_blocks_are_one_state() -> None:
    opened = open_model(build("gpt2"), facts())
    before, after = Site("resid_pre", 2), Site("resid_post", 1)
    states = opened.states(IDS, torch.ones_like(IDS), [before, after])
    torch.testing.assert_close(states[before], states[after], rtol=0, atol=0)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_padded_row_equals_the_same_row_alone(family: str) -> None:
    opened = open_model(build(family), facts(family))
    ids = torch.cat([IDS, torch.tensor([[7, 8, 9, 0, 0, 0, 0]])])
    mask = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0]])
    sites = select_sites(None, None, DEPTH)
    together = opened.states(ids, mask, sites)
    alone = opened.states(ids[1:, :3], mask[1:, :3], sites)
    for site in sites:
        torch.testing.assert_close(together[site][1, :3], alone[site][0], rtol=1e-4, atol=1e-5)


def test_the_pass_ends_at_the_deepest_site() -> None:
    model = build("llama")
    opened = open_model(model, facts())
    ran: list[int] = []
    for i, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    model.lm_head.register_forward_hook(lambda *_: ran.append(-1))
    opened.states(IDS, torch.ones_like(IDS), [Site("resid_post", 1)])
    assert ran == [0] or ran == [0, 1]
    assert -1 not in ran


@pytest.mark.parametrize(
    "family, field, value",
    [
        ("gemma2", "final_logit_softcapping", 30.0),
        ("gemma2", "final_logit_softcapping", None),
        ("cohere", "logit_scale", 0.0651),
        ("granite", "logits_scaling", 7.1),
    ],
)
def test_arithmetic_that_the_config_misstates_is_measured(family: str, field: str, value: Any) -> None:
    model = build(family)
    honest = getattr(model.config, field)
    original = type(model).forward
    bent = type(model.config)(**{**model.config.to_dict(), field: value})

    class Liar(type(model)):  # type: ignore[misc]  # computes with the honest value, says the other
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if hasattr(self, field):
                setattr(self, field, honest)
            self.config, kept = honest_config, self.config
            try:
                return original(self, *args, **kwargs)
            finally:
                self.config = kept

    honest_config = model.config
    model.__class__ = Liar
    model.config = bent
    opened = open_model(model, facts(family))
    name = "softcap" if "softcap" in field else "multiply"
    expected = 1 / honest if family == "granite" else honest
    assert opened.unembed.head.arithmetic.as_dict()[name] == pytest.approx(expected, rel=1e-6)
    state = opened.states(IDS, torch.ones_like(IDS), [LAST])[LAST][0]
    torch.testing.assert_close(opened.unembed.logits(state), own_logits(model), rtol=0, atol=2e-5)


class Bent(nn.Module):
    """A head with a transform of its own, too small to see in plain logits."""

    def __init__(self, head: nn.Module, bend: Any) -> None:
        super().__init__()
        self.head, self.bend = head, bend
        self.weight = head.weight

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.bend(self.head(state))


@pytest.mark.parametrize(
    "bend",
    [
        lambda z: z * 1.01,
        lambda z: z + 0.02 * torch.arange(VOCAB),
        lambda z: 1000 * torch.tanh(z / 1000) + 1e-3 * z,
    ],
    ids=["scaled by 1 %", "a bias that is no parameter", "a gentle cap"],
)
def test_a_transform_hidden_in_the_head_is_refused(bend: Any) -> None:
    model = build("llama")
    model.lm_head = Bent(model.lm_head, bend).eval()
    with pytest.raises(GateError):
        open_model(model, facts())


def test_a_cap_after_the_head_that_plain_logits_do_not_show_is_found() -> None:
    """A cap of 200 bends logits around 1 by less than a float32 can tell; amplified, it shows."""
    model = build("llama")
    plain = type(model).forward

    class Capped(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = plain(self, *args, **kwargs)
            output.logits = 200 * torch.tanh(output.logits / 200)
            return output

    model.lm_head.weight.data.mul_(0.01)
    model.__class__ = Capped
    assert own_logits(model).abs().max() < 1
    assert open_model(model, facts()).unembed.head.arithmetic.softcap == 200


def test_a_bend_after_the_head_that_no_arithmetic_has_is_refused() -> None:
    model = build("llama")
    plain = type(model).forward

    class Bending(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = plain(self, *args, **kwargs)
            output.logits = torch.asinh(output.logits / 50) * 50
            return output

    model.lm_head.weight.data.mul_(0.01)
    model.__class__ = Bending
    with pytest.raises(GateError, match=r"arithmetic none: logits differ by \d.*, amplified logits by [1-9]"):
        open_model(model, facts())


def test_arithmetic_between_the_last_block_and_the_norm_is_repeated_or_refused() -> None:
    model = build("llama")
    norm = model.model.norm
    plain = norm.forward
    handle = model.model.layers[-1].register_forward_hook(lambda *_: None)
    handle.remove()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = norm.weight

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return plain(state)

    inner = Scaled()

    class Outer(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return inner(state * 2)

    model.model.norm = Outer().eval()
    opened = open_model(model, facts())  # inside a module the factor is repeated with it: exact, not refused
    state = opened.states(IDS, torch.ones_like(IDS), [LAST])[LAST][0]
    torch.testing.assert_close(opened.unembed.logits(state), own_logits(model), rtol=0, atol=2e-5)

    forward = type(model.model).forward

    class Functional(type(model.model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            output.last_hidden_state = change(output.last_hidden_state)
            return output

    model.model.__class__ = Functional

    change = partial(torch.mul, other=1.5)

    opened = open_model(model, facts())
    assert opened.gate.chain == ("Outer", "Scale")
    torch.testing.assert_close(opened.unembed.logits(state), own_logits(model), rtol=0, atol=3e-5)

    change = torch.asinh  # type: ignore[assignment]

    with pytest.raises(ModelError, match="does not reach the unembedding"):
        open_model(model, facts())


def test_a_quantised_unembedding_is_refused() -> None:
    model = build("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match="quantised"):
        open_model(model, facts())


def test_a_depth_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(ModelError, match="no list of 5 blocks"):
        open_model(build("llama"), facts(depth=5))


def test_a_final_norm_that_heeds_the_place_of_a_row_is_refused() -> None:
    model = build("llama")
    plain = model.model.norm

    class ByPlace(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return plain(state) * torch.linspace(1, 2, state.shape[1])[None, :, None]

    model.model.norm = ByPlace().eval()
    with pytest.raises(GateError):
        open_model(model, facts())


def test_a_final_norm_that_mixes_rows_is_refused() -> None:
    model = build("llama")
    plain = model.model.norm

    class Mixing(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return plain(state - state.mean(dim=1, keepdim=True))

    model.model.norm = Mixing().eval()
    with pytest.raises(GateError):
        open_model(model, facts())


def test_a_config_with_several_end_tokens_is_probed() -> None:
    model = build("llama")
    model.config.eos_token_id = [2, 5]
    open_model(model, facts())
    assert not {2, 5} & set(probe_ids(model)[0].tolist())
