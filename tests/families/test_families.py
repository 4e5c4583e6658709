"""Every model type of the installed transformers: exact stays exact, and whatever is not is refused, never wrong."""

import re
from pathlib import Path

import pytest
import torch

from lenspipe.models.lens_model import LensModel, open_model
from tests.conftest import ROOT
from tests.families.sweep import PAGE, judge
from tests.families.tiny import TYPES, build

RESULTS = dict(re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", PAGE.read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_is_read_as_the_page_says(model_type: str) -> None:
    verdict = judge(model_type)
    assert verdict.result == RESULTS.get(model_type, verdict.result), verdict.reason
    assert verdict.result != "wrong", verdict.reason


@pytest.mark.parametrize(
    "model_type",
    [
        "bart", "bert-generation", "falcon_h1", "gemma3", "gpt_neox", "granitemoe", "longcat_flash", "mamba2",
        "minicpm3", "nemotron_h", "opt", "qwen2_moe", "recurrent_gemma", "rwkv", "xlm-roberta",
    ],
)  # fmt: skip
def test_a_checkpoint_on_disk_reads_as_the_live_model_does(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    model.save_pretrained(tmp_path)
    for path in (ROOT / "data/tiny-model").glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    ids = [5, 60, 7, 81]
    live, loaded = (opened.capture(ids, ["resid_post"]) for opened in (open_model(model), LensModel.load(tmp_path)))
    assert live.keys() == loaded.keys()
    for site, state in live.items():
        torch.testing.assert_close(loaded[site], state, rtol=0, atol=1e-5)


def test_more_than_160_types_are_exact_and_none_is_wrong() -> None:
    results = list(RESULTS.values())
    assert results.count("exact") > 160
    assert results.count("wrong") == 0
