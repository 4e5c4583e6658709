"""Parts: what the user names of a model is taken as said and held to the same proof; what is no such model is refused.

A part named rightly changes nothing; named wrongly, it never gives numbers.
"""

import json
import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lenspipe.errors import GateError, LenspipeError, ModelError, RequestError
from lenspipe.models.lens_model import LensModel, open_model
from lenspipe.recipe import Parts
from tests.conftest import ROOT
from tests.families.tiny import DEPTH, VOCAB, WIDTH, build

CHECKPOINT = ROOT / "data/tiny-model"
IDS = torch.randint(3, VOCAB, (13,), generator=torch.Generator().manual_seed(11))
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "d_model": WIDTH, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BERT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@cache
def built(family: str) -> Any:
    return build(family)


def own_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS[None]).logits[0].float()


def assert_reads_as_the_model(lens: LensModel) -> None:
    last = f"resid_post.{lens.facts.n_blocks - 1}"
    theirs = own_logits(lens.hf)
    ours = lens.unembed.logits(lens.capture(IDS, [last])[last])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"blocks": "model.layers"}),
    ("llama", {"chain": ["model.norm"]}),
    ("llama", {"head": "lm_head"}),
    ("llama", {"blocks": "model.layers", "chain": ["model.norm"], "head": "lm_head"}),
    ("gpt2", {"blocks": "transformer.h", "chain": ["transformer.ln_f"]}),
    ("cohere", {"multiply": 0.3}),
    ("granite", {"divide": 7.0}),
    ("granite", {"multiply": 1 / 7}),
    ("gemma2", {"softcap": 3.0}),
    ("gemma2", {"chain": ["model.norm"], "softcap": 3.0}),
    ("hyperclovax", {"multiply": 3.0}),
]


@pytest.mark.parametrize("family, named", RIGHT, ids=[f"{family} {'+'.join(named)}" for family, named in RIGHT])
def test_a_part_named_rightly_changes_nothing(family: str, named: dict[str, Any]) -> None:
    model = built(family)
    found, told = open_model(model), open_model(model, parts=Parts(**named))
    assert [*map(id, told.structure.blocks)] == [*map(id, found.structure.blocks)]
    assert [*map(id, told.structure.chain)] == [*map(id, found.structure.chain)]
    assert told.structure.head is found.structure.head
    assert told.structure.port == found.structure.port
    assert_reads_as_the_model(told)
    states = found.capture(IDS, ["resid_pre.0", "resid_post"])
    for name, state in told.capture(IDS, ["resid_pre.0", "resid_post"]).items():
        assert torch.equal(state, states[name])
        ours, theirs = told.unembed.logits(state), found.unembed.logits(state)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_an_empty_chain_is_right_for_a_model_without_a_final_norm() -> None:
    model = build("openai-gpt")
    lens = open_model(model, parts=Parts(chain=[]))
    assert lens.structure.chain == ()
    assert_reads_as_the_model(lens)


@pytest.mark.parametrize(
    "family, named, message",
    [
        ("llama", {"chain": []}, r"with no final norm -> unembedding"),
        ("llama", {"chain": ["model.layers.3.input_layernorm"]}, r"with LlamaRMSNorm -> unembedding"),
        ("llama", {"chain": ["model.norm", "model.norm"]}, r"with LlamaRMSNorm -> LlamaRMSNorm -> unembedding"),
        ("gpt2", {"chain": ["transformer.h.0.ln_1"]}, r"with LayerNorm -> unembedding"),
    ],
)
def test_a_wrong_chain_is_refused_by_the_gate_with_what_it_measured(
    family: str, named: dict[str, Any], message: str
) -> None:
    refusal = r"is not the logits of \w+, so every readout would be wrong; refused\.\n  "
    with pytest.raises(GateError, match=refusal + message + " -> arithmetic none: logits differ by [0-9]") as caught:
        open_model(built(family), parts=Parts(**named))
    assert "[model.parts]" in str(caught.value)


@pytest.mark.parametrize(
    "family, named",
    [
        ("cohere", {"multiply": 0.31}),
        ("cohere", {"divide": 0.3}),
        ("granite", {"divide": 7.1}),
        ("gemma2", {"softcap": 30.0}),
        ("llama", {"softcap": 30.0}),
        ("llama", {"multiply": 2.0}),
    ],
)
def test_arithmetic_named_wrongly_is_never_used(family: str, named: dict[str, float]) -> None:
    with suppress(GateError):
        lens = open_model(built(family), parts=Parts(**named))
        assert named.items().isdisjoint(lens.unembed.head.arithmetic.as_dict().items())
        assert_reads_as_the_model(lens)


@pytest.mark.parametrize(
    "family, named, message",
    [
        ("llama", {"blocks": "model.layer"}, r"model\.parts\.blocks: .* has no 'model\.layer'; model has .*layers"),
        ("llama", {"blocks": "transformer.h"}, r"has no 'transformer\.h'; it has model, lm_head"),
        ("llama", {"chain": ["model.ln_f"]}, r"model\.parts\.chain: .* has no 'model\.ln_f'; model has .*norm"),
        ("llama", {"head": "head"}, r"model\.parts\.head: .* has no 'head'; it has model, lm_head"),
        ("gpt2", {"chain": ["transformer.ln"]}, r"transformer has wte, wpe, drop, h, ln_f"),
    ],
)
def test_an_unknown_name_is_refused_with_the_names_beside_it(family: str, named: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        open_model(built(family), parts=Parts(**named))


@pytest.mark.parametrize(
    "family, named, message",
    [
        ("llama", {"blocks": "model.norm"}, r"'model\.norm' is no module list: name the list of blocks"),
        ("llama", {"head": "model.layers.0.mlp.gate_proj"}, r"does not reach the unembedding \(Linear\)"),
        ("llama", {"head": "model.embed_tokens"}, r"does not reach the unembedding \(Embedding\)"),
        ("llama", {"head": "model.layers"}, r"model.layers has no weight \[V, D\]"),
        ("mixtral", {"blocks": "model.layers.0.mlp"}, r"is no module list"),
    ],
)
def test_a_name_of_something_else_is_refused(family: str, named: dict[str, Any], message: str) -> None:
    with pytest.raises(LenspipeError, match=message):
        open_model(built(family), parts=Parts(**named))


def test_a_list_of_other_modules_is_refused_as_blocks() -> None:
    model = build("llama")
    model.spare = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]).eval()
    with pytest.raises(ModelError, match=r"of its 4 blocks, 0, 1, 2, 3 do not run on a text alone"):
        open_model(model, parts=Parts(blocks="spare"))
    assert_reads_as_the_model(open_model(model))


@pytest.mark.parametrize("field", ["multiply", "divide", "softcap"])
@pytest.mark.parametrize("value", [0.0, -30.0, float("nan")])
def test_arithmetic_that_divides_by_nothing_or_turns_signs_is_no_recipe(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=r"greater than 0|finite number"):
        Parts(**{field: value})


@pytest.mark.parametrize("values", [{"norm": "model.norm"}, {"blocks": ""}, {"head": ""}, {"chain": "model.norm"}])
def test_parts_of_another_name_or_shape_are_no_recipe(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Parts(**values)


class Bent(nn.Module):
    """A head with a transform of its own."""

    def __init__(self, head: nn.Module, bend: Any) -> None:
        super().__init__()
        self.head, self.bend = head, bend
        self.weight = head.weight

    def forward(self, state: Tensor) -> Tensor:
        return self.bend(self.head(state))


@pytest.mark.parametrize(
    "bend",
    [lambda z: 1.01 * z, lambda z: z + 0.01 * z.abs(), lambda z: z.roll(1, -1) * 0.01 + z],
    ids=["scaled", "slanted", "mixed"],
)
@pytest.mark.parametrize("named", [{}, {"head": "lm_head"}, {"chain": ["model.norm"]}])
def test_a_hidden_transform_of_one_percent_in_the_head_is_refused_whatever_is_named(
    bend: Any, named: dict[str, Any]
) -> None:
    model = build("llama")
    model.lm_head = Bent(model.lm_head, bend).eval()
    with pytest.raises(GateError, match="refused"):
        open_model(model, parts=Parts(**named))


def test_a_model_in_training_mode_is_refused_and_left_so() -> None:
    model = build("gpt2").train()
    with pytest.raises(RequestError, match=r"GPT2LMHeadModel is in training mode.*call model\.eval\(\)"):
        open_model(model)
    assert model.training


def test_opening_leaves_a_model_as_it_was() -> None:
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    open_model(model)
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def t5() -> Any:
    settings = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**SMALL, **settings))


def bart() -> Any:
    halves = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in [("layers", 2), ("ffn_dim", 48)]}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    return hf.BartForConditionalGeneration(hf.BartConfig(**SMALL, **halves, **heads))


@pytest.mark.parametrize("make", [t5, bart])
def test_an_encoder_decoder_is_refused(make: Any) -> None:
    with pytest.raises(ModelError, match="is an encoder-decoder: the logit lens reads decoder-only language models"):
        open_model(make().eval())


def test_a_masked_language_model_is_refused_because_its_positions_see_later_tokens() -> None:
    model = hf.BertForMaskedLM(hf.BertConfig(**BERT)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(ModelError, match="earlier positions of BertForMaskedLM see later tokens: it is an encoder"):
        open_model(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_a_base_model_has_no_unembedding_to_read_with(family: str) -> None:
    base = hf.AutoModel.from_config(built(family).config).eval()
    with pytest.raises(ModelError, match=r"has no unembedding matrix to read with: load a \.\.\.ForCausalLM class"):
        open_model(base)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_classifier_has_no_unembedding_to_read_with(family: str) -> None:
    classifier = hf.AutoModelForSequenceClassification.from_config(built(family).config).eval()
    with pytest.raises(ModelError, match=r"has no unembedding matrix to read with: load a \.\.\.ForCausalLM class"):
        open_model(classifier)


def checkpoint(folder: Path, model: Any = None) -> Path:
    """A folder with a tiny model and the tokenizer of the repository's."""
    if model is None:
        torch.manual_seed(5)
        values = json.loads((CHECKPOINT / "config.json").read_text())
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**values)).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder)
    return folder


def test_a_saved_model_and_its_tokenizer_are_loaded_as_transformers_loads_them(tmp_path: Path) -> None:
    lens = LensModel.load(checkpoint(tmp_path), device="cpu")
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    text = "The lens reads every layer."
    ids = lens.to_tokens(text)
    assert ids.tolist() == tokenizer(text)["input_ids"]
    assert lens.to_string(ids) == tokenizer.decode(ids.tolist())
    assert lens.to_string(lens.to_tokens(text, bos="never")) == text
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
    ours = lens.unembed.logits(lens.capture(ids, ["resid_post.3"])["resid_post.3"])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert lens.facts.folder == tmp_path
    assert (lens.facts.n_blocks, lens.facts.d_model, lens.facts.vocab_size) == (4, 32, 384)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_loaded_in_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    lens = LensModel.load(checkpoint(tmp_path), dtype=dtype, device="cpu")
    state = lens.capture([5, 6, 7], ["resid_post.3"])["resid_post.3"]
    assert str(state.dtype) == f"torch.{dtype}"
    assert lens.facts.dtype == lens.gate.dtype == dtype


def without(folder: Path, *keys: str) -> Path:
    weights = load_file(folder / "model.safetensors")
    for key in keys:
        del weights[key]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("key", ["lm_head.weight", "model.norm.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_checkpoint_that_lacks_weights_is_refused_by_their_names(tmp_path: Path, key: str) -> None:
    folder = without(checkpoint(tmp_path), key)
    with pytest.raises(ModelError, match=rf"the checkpoint lacks {key} \(1 in all\), which would be made up at random"):
        LensModel.load(folder, device="cpu")


def test_a_checkpoint_whose_embeddings_are_tied_needs_no_head(tmp_path: Path) -> None:
    values = json.loads((CHECKPOINT / "config.json").read_text()) | {"tie_word_embeddings": True}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**values)).eval()
    folder = checkpoint(tmp_path, model)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    lens = LensModel.load(folder, device="cpu")
    assert torch.equal(lens.unembed.head.weight_VD, model.get_input_embeddings().weight)


def test_a_checkpoint_of_a_base_model_or_a_classifier_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    values = json.loads((CHECKPOINT / "config.json").read_text())
    config = hf.LlamaConfig(**values)
    for name, model in [("base", hf.LlamaModel(config)), ("judge", hf.LlamaForSequenceClassification(config))]:
        with pytest.raises(ModelError, match=r"without a language-model head.*name a checkpoint saved from a"):
            LensModel.load(checkpoint(tmp_path / name, model), device="cpu")


@pytest.mark.parametrize(
    "names, message",
    [
        (["config.json"], "has no config.json, so it is no checkpoint"),
        (["model.safetensors"], "has no weights; expected one of"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer; save the model's tokenizer there"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused_by_what_it_lacks(tmp_path: Path, names: list[str], message: str) -> None:
    folder = checkpoint(tmp_path)
    for name in names:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=message):
        LensModel.load(folder, device="cpu")


def test_a_folder_that_is_not_there_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"no such folder \(looked at {tmp_path}/nowhere\)"):
        LensModel.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "named",
    [
        {"chain": ["model.layers"]}, {"chain": ["model.embed_tokens"]}, {"chain": ["model"]}, {"chain": ["lm_head"]},
        {"chain": ["model.layers.0.self_attn"]}, {"chain": ["model.layers.0.mlp.up_proj"]}, {"head": "model.norm"},
        {"head": "model.embed_tokens", "chain": ["model.norm"]}, {"head": "model.layers.3.mlp", "chain": []},
    ],
    ids=str,
)  # fmt: skip
def test_a_part_of_another_kind_is_refused_and_not_run_into(named: dict[str, Any]) -> None:
    with pytest.raises((ModelError, RequestError)):
        open_model(build("llama"), parts=Parts(**named))


def test_a_named_head_is_used_where_the_model_tells_of_none() -> None:
    model = build("llama")
    model.get_output_embeddings = lambda: None
    assert_reads_as_the_model(open_model(model, parts=Parts(head="lm_head")))


@pytest.mark.parametrize("named", [{"multiply": 2.0}, {"softcap": 30.0}, {"divide": 8.0}], ids=str)
def test_arithmetic_named_wrongly_is_refused_and_not_replaced(named: dict[str, float]) -> None:
    with pytest.raises(GateError):
        open_model(build("llama"), parts=Parts(**named))


@pytest.mark.parametrize("ids", [["a", "b"], [[1], [2, 3]], [2**70], [None], None, {"a": 1}, b"ab", [5, "a"]], ids=repr)
def test_what_is_no_sequence_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(RequestError, match="token ids"):
        open_model(build("llama")).capture(ids, ["resid_post.0"])


def test_one_kind_of_site_may_be_named_without_a_list() -> None:
    assert len(open_model(build("llama")).capture([5, 6], "resid_post")) == DEPTH


@pytest.mark.parametrize(
    "sites", [[], [3], ["resid_post.01"], ["resid_post." + "9" * 5000]], ids=["none", "int", "01", "9"]
)
def test_sites_that_are_none_are_refused(sites: Any) -> None:
    with pytest.raises(RequestError, match="site"):
        open_model(build("llama")).capture([5, 6], sites)


def test_what_is_no_model_is_refused() -> None:
    for other in ("gpt2", nn.Linear(3, 3).eval()):
        with pytest.raises(RequestError, match="a transformers model is needed"):
            open_model(other)


def test_one_module_in_training_mode_is_noticed() -> None:
    model = build("gpt2")
    model.transformer.h[1].train()
    with pytest.raises(RequestError, match="training mode"):
        open_model(model)
