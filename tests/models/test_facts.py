"""What is known of a checkpoint without loading it: digests that follow what decides numbers, and nothing else."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from lenspipe.models import digests
from lenspipe.models.digests import digest_files
from lenspipe.models.facts import ModelFacts, read_facts
from lenspipe.recipe import make_recipe
from tests.conftest import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LENSPIPE_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "model"
    copy.mkdir()
    for path in (ROOT / "data/tiny-model").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def facts(folder: Path) -> ModelFacts:
    return read_facts(make_recipe({"model": {"source": str(folder)}, "corpus": {"source": "none"}}))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_facts_of_a_folder(folder: Path) -> None:
    found = facts(folder)
    assert (found.n_blocks, found.d_model, found.vocab_size, found.max_positions) == (4, 32, 384, 256)
    assert found.dtype == "float32"


@pytest.mark.parametrize(
    "name, field", [("config.json", "_name_or_path"), ("tokenizer_config.json", "local_files_only")]
)
def test_how_a_checkpoint_was_fetched_is_in_no_digest(folder: Path, name: str, field: str) -> None:
    before = facts(folder)
    edit(folder / name, **{field: True})
    assert facts(folder) == before


@pytest.mark.parametrize(
    "name, field, value, changed",
    [
        ("config.json", "rms_norm_eps", 0.02, "digest"),
        ("tokenizer_config.json", "add_prefix_space", True, "tokenizer_digest"),
        ("tokenizer.json", "truncation", {"max_length": 3}, "tokenizer_digest"),
    ],
)
def test_what_changes_numbers_is_in_its_digest(
    folder: Path, name: str, field: str, value: object, changed: str
) -> None:
    before = facts(folder)
    edit(folder / name, **{field: value})
    differ = {f for f in ("digest", "tokenizer_digest") if getattr(before, f) != getattr(facts(folder), f)}
    assert differ == {changed}


def test_one_flipped_bit_of_the_weights_is_another_model(folder: Path) -> None:
    before = facts(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    assert facts(folder).digest != before.digest


def test_a_file_is_hashed_once_and_again_when_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    real = hashlib.file_digest
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or real(file, kind))
    path = folder / "model.safetensors"
    first = digest_files([path])
    assert digest_files([path]) == first == {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    assert len(hashed) == 1
    os.utime(path, ns=(1, 1))
    assert digest_files([path]) == first
    assert len(hashed) == 2


def test_a_hub_blob_named_by_its_digest_is_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENSPIPE_CACHE", str(tmp_path / "cache"))
    name = "ab" * 32
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(b"not what the name says")
    link = tmp_path / "model.safetensors"
    link.symlink_to(tmp_path / "blobs" / name)
    assert digest_files([link]) == {"model.safetensors": name}
