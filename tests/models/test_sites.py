"""Sites inside blocks: what attention and MLP add, the state between them, and refusal where there is none.

The truth is the block itself: what it was given and what it returned, and what its own attention and MLP modules gave,
by hooks of our own.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lenspipe.errors import ModelError, RequestError
from lenspipe.grid import KINDS, parse_site, select_sites
from lenspipe.models.lens_model import LensModel, open_model
from tests.families.sweep import blocks_of
from tests.families.tiny import DEPTH, POSITIONS, VOCAB, WIDTH, build
from tests.models.families import build as build_by_config

IDS = torch.randint(3, VOCAB, (19,), generator=torch.Generator().manual_seed(7))
ROUNDING = 1e-5

PRE_NORM = ["llama", "gpt2", "bloom", "mpt", "opt", "gpt_neo", "qwen3", "starcoder2", "deepseek_v3"]
NORMED_BRANCH = ["gemma2", "gemma3_text", "olmo2", "glm4"]
SCALED_BRANCH = ["granite", "minicpm3"]
EXPERTS = ["mixtral", "qwen2_moe"]
HYBRID = ["jamba", "recurrent_gemma", "lfm2"]
SEQUENTIAL = [*PRE_NORM, *NORMED_BRANCH, *SCALED_BRANCH, *EXPERTS, *HYBRID]
PARALLEL = ["gpt_neox", "falcon", "cohere", "phi", "gptj", "codegen"]
ONE_BRANCH = ["nemotron_h", "zamba2", "mamba"]


@cache
def opened(family: str) -> LensModel:
    return open_model(build(family))


def blocks_pass(model: Any) -> list[tuple[Tensor, Tensor]]:
    """What each block is given and what it returns, [S, D] each."""
    found: list[tuple[Tensor, Tensor]] = []
    given: list[Tensor] = []

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        given.append((args[0] if args else kwargs["hidden_states"]).clone())

    def after(_module: Any, _args: Any, output: Any) -> None:
        found.append((given[-1][0], (output[0] if isinstance(output, tuple) else output)[0].clone()))

    handles = []
    for block in blocks_of(model, DEPTH):
        handles += [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    with torch.no_grad():
        model(IDS[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def outputs_of(model: Any, modules: list[nn.Module]) -> list[Tensor]:
    """What some modules return, [S, D] each."""
    found: dict[nn.Module, Tensor] = {}

    def keep(module: Any, _args: Any, output: Any) -> None:
        found[module] = (output[0] if isinstance(output, tuple) else output).reshape(len(IDS), -1).clone()

    handles = [module.register_forward_hook(keep) for module in modules]
    with torch.no_grad():
        model(IDS[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [found[module] for module in modules]


def assert_close(ours: Tensor, theirs: Tensor, scale: Tensor | None = None) -> None:
    largest = float((theirs if scale is None else scale).abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING * largest)


@pytest.mark.parametrize("family", SEQUENTIAL)
def test_the_state_in_the_middle_is_the_input_and_attention_and_the_output_is_that_and_the_mlp(family: str) -> None:
    model = opened(family)
    found = model.capture(IDS, ["attn_out", "resid_mid", "mlp_out"])
    for i, (pre, post) in enumerate(blocks_pass(model.hf)):
        attention, mid, mlp = (found[f"{kind}.{i}"] for kind in ("attn_out", "resid_mid", "mlp_out"))
        assert_close(pre + attention, mid, post)
        assert_close(mid + mlp, post)
        for added in (attention, mlp):
            assert added.abs().max() > 1e-3 * post.abs().max()


@pytest.mark.parametrize("family", PARALLEL)
def test_in_a_parallel_block_both_branches_and_the_input_make_the_output(family: str) -> None:
    model = opened(family)
    found = model.capture(IDS, ["attn_out", "mlp_out"])
    for i, (pre, post) in enumerate(blocks_pass(model.hf)):
        assert_close(pre + found[f"attn_out.{i}"] + found[f"mlp_out.{i}"], post)
        assert not torch.allclose(found[f"attn_out.{i}"], found[f"mlp_out.{i}"], atol=1e-2)


@pytest.mark.parametrize("family", PARALLEL)
def test_a_parallel_block_has_no_middle_and_says_so(family: str) -> None:
    with pytest.raises(ModelError, match=r"resid_mid\.2 does not exist: .*parallel.*no block of this model has resid_"):
        opened(family).capture(IDS, ["resid_mid.2"])


def test_the_same_family_with_its_blocks_sequential_has_a_middle() -> None:
    """GPT-NeoX runs either way, as its config says: what a block does decides, not what it is called."""
    model = build("gpt_neox")
    for block in model.gpt_neox.layers:
        block.use_parallel_residual = False
    lens = open_model(model)
    found = lens.capture(IDS, ["attn_out", "resid_mid", "mlp_out"])
    for i, (pre, post) in enumerate(blocks_pass(model)):
        assert_close(pre + found[f"attn_out.{i}"], found[f"resid_mid.{i}"], post)
        assert_close(found[f"resid_mid.{i}"] + found[f"mlp_out.{i}"], post)


# Per family: a block's attention, its MLP, and the factor on what they return.
OWN: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any], nn.Module], float]] = {
    "llama": (lambda b: b.self_attn, lambda b: b.mlp, 1.0),
    "gpt2": (lambda b: b.attn, lambda b: b.mlp, 1.0),
    "gpt_neox": (lambda b: b.attention, lambda b: b.mlp, 1.0),
    "falcon": (lambda b: b.self_attention, lambda b: b.mlp, 1.0),
    "mixtral": (lambda b: b.self_attn, lambda b: b.mlp, 1.0),
    "gemma2": (lambda b: b.post_attention_layernorm, lambda b: b.post_feedforward_layernorm, 1.0),
    "olmo2": (lambda b: b.post_attention_layernorm, lambda b: b.post_feedforward_layernorm, 1.0),
    "granite": (lambda b: b.self_attn, lambda b: b.mlp, 0.6),
    "opt": (lambda b: b.self_attn, lambda b: b.fc2, 1.0),
}


@pytest.mark.parametrize("family", OWN)
def test_what_a_branch_adds_is_what_the_familys_own_module_returns(family: str) -> None:
    attention, mlp, factor = OWN[family]
    model = opened(family)
    blocks: list[Any] = blocks_of(model.hf, DEPTH)
    found = model.capture(IDS, ["attn_out", "mlp_out"])
    for kind, part in (("attn_out", attention), ("mlp_out", mlp)):
        for i, theirs in enumerate(outputs_of(model.hf, [part(block) for block in blocks])):
            torch.testing.assert_close(found[f"{kind}.{i}"], factor * theirs, rtol=2e-6, atol=0)


def test_attention_of_a_hybrid_is_whatever_mixes_positions() -> None:
    model = opened("jamba")
    blocks: list[Any] = model.hf.model.layers
    mixers = [block.self_attn if hasattr(block, "self_attn") else block.mamba for block in blocks]
    assert {type(mixer).__name__ for mixer in mixers} == {"JambaAttention", "JambaMambaMixer"}
    found = model.capture(IDS, ["attn_out"])
    for i, theirs in enumerate(outputs_of(model.hf, mixers)):
        assert torch.equal(found[f"attn_out.{i}"], theirs)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_the_middle_state_is_what_the_second_norm_is_given(family: str) -> None:
    names = {"gpt2": "ln_2", "gemma2": "pre_feedforward_layernorm", "opt": "final_layer_norm"}
    model = opened(family)
    given: list[Tensor] = []
    handles = [
        getattr(block, names.get(family, "post_attention_layernorm")).register_forward_pre_hook(
            lambda _m, args: given.append(args[0].reshape(len(IDS), -1).clone())
        )
        for block in blocks_of(model.hf, DEPTH)
    ]
    found = model.capture(IDS, ["resid_mid"])
    with torch.no_grad():
        model.hf(IDS[None])
    for handle in handles:
        handle.remove()
    for i, theirs in enumerate(given[-DEPTH:]):
        assert torch.equal(found[f"resid_mid.{i}"], theirs)


@pytest.mark.parametrize("kind", ["attn_out", "resid_mid", "mlp_out"])
@pytest.mark.parametrize("family", ONE_BRANCH)
def test_a_block_of_one_branch_has_no_sites_inside(family: str, kind: str) -> None:
    with pytest.raises(ModelError, match=rf"{kind}\.1 does not exist: the block has one branch.*; no block of this"):
        opened(family).capture(IDS, [f"{kind}.1"])


@pytest.mark.parametrize("kind", ["attn_out", "resid_mid", "mlp_out"])
@pytest.mark.parametrize("family", ["bert", "opt_post_norm"])
def test_a_block_that_norms_the_sum_has_no_sites_inside(family: str, kind: str) -> None:
    model = opened(family) if family == "bert" else open_model(build_by_config(family))
    with pytest.raises(
        ModelError,
        match=rf"{kind}\.1 does not exist: its output is not its input with two branches added; no block of this",
    ):
        model.capture(IDS, [f"{kind}.1"])


@pytest.mark.parametrize("kind", ["attn_out", "resid_mid", "mlp_out"])
def test_a_site_that_only_some_blocks_have_is_refused_with_the_blocks_that_have_it(kind: str) -> None:
    """Block 0 of RWKV norms the embeddings first, so its branches do not start from what it is given."""
    model = opened("rwkv")
    found = model.capture(IDS, [f"{kind}.{i}" for i in (1, 2, 3)])
    assert list(found) == [f"{kind}.{i}" for i in (1, 2, 3)]
    with pytest.raises(ModelError, match=rf"{kind}\.0 does not exist: .*; blocks that have {kind}: 1, 2, 3$"):
        model.capture(IDS, [kind])


def test_an_absent_site_is_refused_before_the_model_runs() -> None:
    model = opened("gpt_neox")
    _ = model.branches
    ran: list[int] = []
    handle = model.hf.gpt_neox.embed_in.register_forward_hook(lambda *_: ran.append(1))
    with pytest.raises(ModelError, match="parallel"):
        model.capture(IDS, ["resid_post.0", "resid_mid.0"])
    handle.remove()
    assert not ran


def test_layers_count_blocks_and_halves_lie_between() -> None:
    layers = {kind: parse_site(f"{kind}.2", DEPTH).layer for kind in KINDS}
    assert layers == {"resid_pre": 2, "attn_out": 2.5, "resid_mid": 2.5, "mlp_out": 3, "resid_post": 3}
    assert {kind for kind in KINDS if parse_site(f"{kind}.2", DEPTH).is_state} == {
        "resid_pre",
        "resid_mid",
        "resid_post",
    }


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_layers_state_is_what_transformers_numbers_so(family: str) -> None:
    model = opened(family)
    found = model.capture(IDS, ["resid_pre"])
    with torch.no_grad():
        theirs = model.hf(IDS[None], output_hidden_states=True).hidden_states
    for layer in range(DEPTH):
        assert parse_site(f"resid_pre.{layer}", DEPTH).layer == layer
        assert_close(found[f"resid_pre.{layer}"], theirs[layer][0])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_in_bfloat16_the_sums_are_the_models_own_to_the_last_bit(family: str) -> None:
    """The model rounds each sum once; so do we, with the same numbers."""
    model = open_model(build(family, torch.bfloat16))
    found = model.capture(IDS, ["attn_out", "resid_mid", "mlp_out"])
    ends = model.capture(IDS, ["resid_post"]) | model.capture(IDS, ["resid_pre.0"])
    for i in range(DEPTH):
        pre = ends["resid_pre.0"] if i == 0 else ends[f"resid_post.{i - 1}"]
        mid = found[f"resid_mid.{i}"]
        assert mid.dtype == torch.bfloat16
        assert torch.equal(pre + found[f"attn_out.{i}"], mid)
        assert torch.equal(mid + found[f"mlp_out.{i}"], ends[f"resid_post.{i}"])


@pytest.mark.parametrize(
    "site, last",
    [
        ("resid_pre.0", "embed_tokens"),
        ("resid_pre.1", "layers.0"),
        ("attn_out.1", "layers.1.self_attn"),
        ("resid_mid.1", "layers.1.self_attn"),
        ("mlp_out.1", "layers.1.mlp"),
        ("resid_post.1", "layers.1.mlp"),
    ],
)
def test_nothing_behind_a_site_is_run(site: str, last: str) -> None:
    """A module's own hook speaks when it returns, and so not where ours ended the pass."""
    model = build("llama")
    lens = open_model(model)
    _ = lens.branches
    watched = ["embed_tokens", *(f"layers.{i}.{part}" for i in range(DEPTH) for part in ("self_attn", "mlp")), "norm"]
    begun: list[str] = []
    for name in watched:
        module = model.model.get_submodule(name)
        module.register_forward_pre_hook(lambda *_, name=name: begun.append(name))
    lens.capture(IDS, [site])
    expected = watched[: watched.index(last if last != "layers.0" else "layers.0.mlp") + 1]
    assert begun == expected


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "granite", "jamba"])
def test_sites_asked_for_together_are_what_they_are_alone(family: str) -> None:
    model = opened(family)
    kinds = ["attn_out", "mlp_out", "resid_post", *(["resid_mid"] if family not in PARALLEL else [])]
    together = model.capture(IDS, ["resid_pre.0", *kinds])
    assert len(together) == 1 + DEPTH * len(kinds)
    for name, state in together.items():
        alone = model.capture(IDS, [name])
        assert list(alone) == [name]
        assert torch.equal(alone[name], state), name


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_what_a_site_holds_is_a_copy_that_later_arithmetic_does_not_reach(family: str) -> None:
    model = opened(family)
    found = model.capture(IDS, ["resid_pre.0", "attn_out.0"])
    kept = {name: state.clone() for name, state in found.items()}
    for state in found.values():
        state.mul_(3)
    again = model.capture(IDS, ["resid_pre.0", "attn_out.0"])
    for name, state in again.items():
        assert torch.equal(state, kept[name])


def test_reading_leaves_no_hook_behind_even_after_a_refusal() -> None:
    model = build("llama")
    lens = open_model(model)
    lens.capture(IDS, ["resid_mid", "mlp_out", "resid_post"])
    with pytest.raises(RequestError):
        lens.capture([VOCAB], ["resid_mid"])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_capture_names_every_site_and_gives_a_row_per_token() -> None:
    found = opened("llama").capture(IDS, ["mlp_out.3", "resid_pre.0", "resid_mid"])
    expected = ["resid_pre.0", *(f"resid_mid.{i}" for i in range(DEPTH)), "mlp_out.3"]
    assert sorted(found) == sorted(expected)
    assert {(tuple(state.shape), state.dtype) for state in found.values()} == {((len(IDS), WIDTH), torch.float32)}
    assert not any(state.requires_grad for state in found.values())


@pytest.mark.parametrize(
    "form", [list, lambda ids: ids[None], lambda ids: ids.to(torch.int32), lambda ids: ids.numpy()]
)
def test_token_ids_may_come_in_any_form_that_holds_integers(form: Callable[[Tensor], Any]) -> None:
    model = opened("llama")
    expected = model.capture(IDS, ["resid_post.3"])["resid_post.3"]
    assert torch.equal(model.capture(form(IDS), ["resid_post.3"])["resid_post.3"], expected)


@pytest.mark.parametrize(
    "ids, message",
    [
        ("the cat", r"'the cat' is a text where token ids belong: use to_tokens first"),
        ([], r"one sequence of at least one id; found shape \(0,\)"),
        (5, r"one sequence of at least one id; found shape \(\)"),
        ([[5, 6], [7, 8]], r"one sequence of at least one id; found shape \(2, 2\)"),
        ([[[5]]], r"found shape \(1, 1, 1\)"),
        ([5, VOCAB], r"token id 97: this model has ids 0 to 96"),
        ([5, -1], r"token id -1: this model has ids 0 to 96"),
        ([5.0, 6.0], r"token ids must be integers; found torch.float32"),
        ([True, False], r"token ids must be integers; found torch.bool"),
        ([5j], r"token ids must be integers; found torch.complex64"),
        ([5] * (POSITIONS + 1), r"65 tokens, and LlamaForCausalLM has 64 positions: shorten the text"),
    ],
)
def test_what_is_no_sequence_of_token_ids_is_refused(ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        opened("llama").capture(ids, ["resid_post"])


def test_a_sequence_as_long_as_the_model_is_read() -> None:
    found = opened("llama").capture([5] * POSITIONS, ["resid_post.0"])
    assert found["resid_post.0"].shape == (POSITIONS, WIDTH)


@pytest.mark.parametrize(
    "sites, message",
    [
        (["resid_middle.1"], r"unknown site 'resid_middle.1'.*Did you mean 'resid_mid'"),
        (["attn_out.4"], r"unknown site 'attn_out.4': this model has 4 blocks, so write attn_out.0 to attn_out.3"),
        (["mlp_out.-1"], r"unknown site 'mlp_out.-1'"),
        (["mlp_out.x"], r"unknown site 'mlp_out.x'"),
        (["resid_pre.1", "resid_post.0"], r"resid_pre.1 and resid_post.0 are one state \(layer 1\)"),
    ],
)
def test_a_site_that_no_model_of_this_depth_has_is_refused(sites: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        opened("llama").capture(IDS, sites)


def test_sites_in_a_padded_batch_are_those_of_each_row_alone() -> None:
    for family in ("llama", "mixtral", "bloom", "recurrent_gemma"):
        model = opened(family)
        ids, mask = torch.zeros(2, len(IDS), dtype=torch.long), torch.zeros(2, len(IDS), dtype=torch.long)
        ids[0], mask[0] = IDS, 1
        ids[1, :8], mask[1, :8] = IDS[:8].flip(0), 1
        sites = select_sites(["attn_out", "resid_mid", "mlp_out"], None, DEPTH)
        together = model.states(ids, mask, sites)
        alone = model.capture(IDS[:8].flip(0), ["attn_out", "resid_mid", "mlp_out"])
        for site in sites:
            assert together[site].shape == (2, len(IDS), WIDTH)
            assert_close(together[site][1, :8], alone[site.name])
