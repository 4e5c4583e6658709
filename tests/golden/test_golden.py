"""The numbers and keys of every stage are those that were kept for its version."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lenspipe.stages.work import STAGES, VERSION
from tests.golden.numbers import FOLDER, KEYS, compute, file_of

REMEDY = (
    "the numbers of stage {stage} are not those of version {version}: raise VERSION[{stage!r}] in "
    "lenspipe/stages/work.py, say so in CHANGELOG.md, and keep the new ones: python -m tests.golden.numbers. "
    "What differs: {what}"
)


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, list[str]]]:
    return compute(tmp_path_factory.mktemp("golden"))


def difference(kept: Any, now: Any) -> str:
    """Say how two arrays differ beyond what another processor does; nothing where they do not."""
    if (kept.shape, kept.dtype) != (now.shape, now.dtype):
        return f"{kept.dtype} {kept.shape} -> {now.dtype} {now.shape}"
    if kept.dtype.kind != "f":
        return "" if np.array_equal(kept, now) else f"{(kept != now).sum()} of {kept.size} are others"
    close = np.isclose(kept, now, rtol=1e-4, atol=1e-5, equal_nan=True)
    return "" if close.all() else f"{(~close).sum()} of {close.size} differ"


@pytest.mark.parametrize("stage", STAGES)
def test_the_numbers_are_those_of_the_stages_version(stage: str, today: tuple[dict[str, Any], Any]) -> None:
    with np.load(file_of(stage), allow_pickle=False) as kept:
        assert set(kept) == set(today[0][stage])
        wrong = {name: found for name in kept if (found := difference(kept[name], today[0][stage][name]))}
    assert not wrong, REMEDY.format(stage=stage, version=VERSION[stage], what=wrong)


def test_one_version_of_each_stage_is_kept() -> None:
    assert {path.name for path in FOLDER.glob("*.npz")} == {f"{stage}-{VERSION[stage]}.npz" for stage in STAGES}


def test_the_keys_are_those_that_were_kept(today: tuple[Any, dict[str, list[str]]]) -> None:
    assert today[1] == json.loads(KEYS.read_text()), (
        "other keys for the same work: whatever users have stored would be computed anew. If that is meant, say so in "
        "CHANGELOG.md and keep the new ones: python -m tests.golden.numbers"
    )


def test_a_change_of_a_number_does_not_go_unnoticed() -> None:
    kept = np.array([1.0, np.nan, 3.0], np.float32)
    assert difference(kept, kept.copy()) == ""
    assert difference(kept, kept + np.float32(1e-6)) == ""
    assert difference(kept, kept * np.float32(1.001)) == "2 of 3 differ"
    assert difference(np.arange(3), np.array([0, 1, 3])) == "1 of 3 are others"
    assert difference(np.arange(3), np.arange(4)) != ""


def test_what_is_kept_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir() if path.is_file()) < 600_000
