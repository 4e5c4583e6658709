"""Several lenses in one run and in memory: the same residuals, captured once, and each lens has its own numbers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lenspipe import open_dataset, plan_recipe, run
from lenspipe.errors import RequestError
from lenspipe.lenses.files import load_lens
from lenspipe.models.lens_model import LensModel
from lenspipe.prompts import logit_lens
from lenspipe.recipe import make_recipe
from lenspipe.validation import validate_lens
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("prefect_server")
Values = dict[str, Any]
TINY, DEPTH, WIDTH = ROOT / "data/tiny-model", 4, 32


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned lens whose maps differ from layer to layer."""
    folder = tmp_path_factory.mktemp("lenses") / "tuned"
    folder.mkdir()
    write_tuned(folder, seed=0)
    return folder


def write_tuned(folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = {"d_model": WIDTH, "num_hidden_layers": DEPTH, "bias": True, "lens_type": "linear_tuned_lens"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"{i}.weight": 0.3 * torch.randn(WIDTH, WIDTH, generator=generator) for i in range(DEPTH)}
    biases = {f"{i}.bias": 0.5 * torch.randn(WIDTH, generator=generator) for i in range(DEPTH)}
    torch.save(weights | biases, folder / "params.pt")


@pytest.fixture(scope="module")
def jacobian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Jacobian lens for the outputs of blocks 1 and 2."""
    path = tmp_path_factory.mktemp("lenses") / "jacobian.pt"
    generator = torch.Generator().manual_seed(1)
    maps = {block: torch.randn(WIDTH, WIDTH, generator=generator).half() for block in (1, 2)}
    torch.save({"J": maps, "n_prompts": 7, "source_layers": [1, 2], "d_model": WIDTH}, path)
    return path


def with_lens(values: Values, *lenses: object, **read: Any) -> Any:
    return make_recipe({**values, "read": {**values["read"], "lens": [str(lens) for lens in lenses], **read}})


def test_a_run_with_two_lenses_holds_each_ones_numbers(values: Values, tuned: Path) -> None:
    ds = open_dataset(run(with_lens(values, "logit", tuned)))
    assert ds["entropy"].dims == ("lens", "layer", "token")
    assert list(ds["lens"].values) == ["logit", "tuned"]
    plain = open_dataset(
        run(with_lens({**values, "run": {**values["run"], "store": values["run"]["store"] + "2"}}, "logit"))
    )
    for name in plain.data_vars:
        np.testing.assert_array_equal(ds[name].sel(lens="logit") if "lens" in ds[name].dims else ds[name], plain[name])

    model = LensModel.load(TINY)
    params = torch.load(tuned / "params.pt", weights_only=True)
    row = ds.isel(token=slice(0, int(ds["document_length"][0])))
    ids = torch.tensor(row["input_id"].values.astype(np.int64))
    with torch.no_grad():
        states = model.hf(ids[None], output_hidden_states=True).hidden_states
        for i in range(DEPTH):
            state = states[i][0].double()
            mapped = state + state @ params[f"{i}.weight"].double().T + params[f"{i}.bias"].double()
            logits = model.hf.lm_head(model.hf.model.norm(mapped.float())).double()
            expected = torch.logsumexp(logits, dim=1)
            np.testing.assert_allclose(row["logsumexp"].sel(lens="tuned", layer=i), expected, atol=2e-5)


def test_a_second_lens_captures_nothing_and_reads_only_itself(values: Values, tuned: Path) -> None:
    run(with_lens(values, "logit"))
    counts = {stage: todo for stage, _, todo in plan_recipe(with_lens(values, "logit", tuned)).counts()}
    shards = len(plan_recipe(with_lens(values, "logit")).shards)
    assert counts == {"encode": 0, "capture": 0, "read": shards * (DEPTH + 1), "assemble": 1}


def test_other_bytes_in_a_lens_are_another_lens(values: Values, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write_tuned(folder, seed=5)
    before = plan_recipe(with_lens(values, folder)).dataset
    write_tuned(folder, seed=6)
    assert plan_recipe(with_lens(values, folder)).dataset != before


@pytest.mark.parametrize("format", ["tuned", "jacobian"])
def test_the_layers_of_a_lens_are_the_layers_of_the_dataset(format: str, tmp_path: Path) -> None:
    """A lens that is the identity at layer 2 alone agrees with the logit lens there and at the end alone."""
    if format == "tuned":
        path = tmp_path / "lens"
        path.mkdir()
        config = {"d_model": WIDTH, "num_hidden_layers": DEPTH, "bias": False, "lens_type": "linear_tuned_lens"}
        (path / "config.json").write_text(json.dumps(config))
        far = torch.ones(WIDTH, WIDTH)
        torch.save(
            {f"{i}.weight": torch.zeros(WIDTH, WIDTH) if i == 2 else far for i in range(DEPTH)}, path / "params.pt"
        )
    else:
        path = tmp_path / "lens.pt"
        far = torch.ones(WIDTH, WIDTH) + torch.eye(WIDTH)
        maps = {block: torch.eye(WIDTH) if block == 1 else far for block in range(DEPTH - 1)}
        torch.save({"J": maps, "n_prompts": 1, "source_layers": list(maps), "d_model": WIDTH}, path)
    sites = None if format == "tuned" else "resid_post"
    ds = logit_lens(TINY, "the capital of France", sites=sites, lens=["logit", path])
    apart = np.abs(ds["entropy"].isel(lens=0) - ds["entropy"].isel(lens=1)).max("token")
    assert [float(layer) for layer in ds["layer"].values[apart.values == 0]] == [2, 4]


def test_a_state_without_a_map_is_refused_before_anything_is_captured(values: Values, jacobian: Path) -> None:
    with pytest.raises(
        RequestError, match=r"no map for resid_pre.0, resid_post.0: it covers the stream at layers 2, 3, 4"
    ):
        run(with_lens(values, jacobian))
    assert not (Path(values["run"]["store"]) / "capture").exists()


def test_a_state_without_a_map_is_read_plainly_if_asked(jacobian: Path) -> None:
    ds = logit_lens(TINY, "the capital", lens=["logit", jacobian], uncovered="logit", sites=["resid_post", "attn_out"])
    same = (ds["topk_logit"].isel(lens=0) == ds["topk_logit"].isel(lens=1)).all(["token", "k"])
    covered = np.isin(ds["site"].values, ["resid_post.1", "resid_post.2"])
    np.testing.assert_array_equal(same.values, ~covered)


def test_a_branch_is_no_state_that_a_trained_lens_could_map(tuned: Path) -> None:
    with pytest.raises(RequestError, match=r"no map for mlp_out\.0"):
        logit_lens(TINY, "the capital", lens=tuned, sites=["mlp_out"])


def test_two_lenses_of_one_name_are_refused(values: Values, tuned: Path) -> None:
    with pytest.raises(RequestError, match="two lenses are called 'tuned'"):
        with_lens(values, tuned, "elsewhere/tuned")


def test_a_lens_of_another_model_is_refused(tuned: Path) -> None:
    with pytest.raises(RequestError, match="32"):
        load_lens(tuned, 64, DEPTH)


def test_validation_scores_a_lens_by_its_divergence_from_the_last_layer(values: Values, jacobian: Path) -> None:
    scores = validate_lens(with_lens(values, jacobian), documents=3)
    assert list(scores.columns) == ["logit", "jacobian.pt"]
    assert scores["jacobian.pt"].notna().tolist() == [False, False, True, True, True]
    lines = Path(values["corpus"]["source"]).read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[:3]]
    ds = logit_lens(TINY, texts, lens=jacobian, uncovered="logit")
    kl = ds["kl_final"].sel(layer=3).where(~ds["is_special"])
    by_document = [float(kl.isel(token=ds["document"].values == i).mean()) for i in range(3)]
    assert scores.loc[3, "jacobian.pt"] == pytest.approx(np.mean(by_document), rel=1e-5)
    assert scores.loc[4, "logit"] == pytest.approx(0, abs=1e-6)


def test_a_run_reads_what_lies_inside_blocks(values: Values) -> None:
    sites = ["resid_mid", "attn_out.1", "mlp_out.3", "resid_post.1"]
    path = run(make_recipe({**values, "capture": {"sites": sites}}))
    ds = open_dataset(path)
    assert list(ds["site"].values) == [
        "resid_mid.0", "attn_out.1", "resid_mid.1", "resid_post.1", "resid_mid.2", "resid_mid.3", "mlp_out.3",
    ]  # fmt: skip
    assert list(ds["layer"].values) == [0.5, 1.5, 1.5, 2.0, 2.5, 3.5, 4.0]
    model = LensModel.load(TINY)
    row = ds.isel(token=slice(0, int(ds["document_length"][0])))
    ids = torch.tensor(row["input_id"].values.astype(np.int64))[None]
    seen: list[torch.Tensor] = []
    hook = model.hf.model.layers[1].self_attn.register_forward_hook(lambda _m, _a, out: seen.append(out[0][0]))
    with torch.no_grad():
        model.hf(ids)
        logits = model.hf.lm_head(model.hf.model.norm(seen[0]))
    hook.remove()
    expected = torch.logsumexp(logits.double(), dim=1)
    np.testing.assert_allclose(row["logsumexp"].sel(site="attn_out.1"), expected, atol=2e-5)


def test_the_command_line_scores_a_lens(values: Values, jacobian: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    source = values["corpus"]["source"]
    recipe.write_text(
        f'[model]\nsource = "{TINY}"\n[corpus]\nsource = "{source}"\n[read]\nlens = ["logit", "{jacobian}"]\n'
    )
    command = [sys.executable, "-m", "lenspipe.cli", "validate-lens", str(recipe), "--documents", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "of the 3 layers it covers" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[2] == "—" for row in rows] == [True, True, False, False, False]


def test_the_command_line_reads_a_prompt_with_a_lens(jacobian: Path) -> None:
    command = [sys.executable, "-m", "lenspipe.cli", "lens", "the capital", "-m", str(TINY), "--lens", "logit"]
    done = subprocess.run([*command, "--lens", str(jacobian)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "lens jacobian.pt" in done.stdout
    assert sum(line.strip()[:1].isdigit() for line in done.stdout.splitlines()) == 2 * (DEPTH + 1)
