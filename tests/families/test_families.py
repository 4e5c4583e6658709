"""Every model type of the installed transformers: exact stays exact, and whatever is not is refused, never wrong."""

import re

import pytest

from tests.families.sweep import PAGE, judge
from tests.families.tiny import TYPES

RESULTS = dict(re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", PAGE.read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_type_is_read_as_the_page_says(model_type: str) -> None:
    verdict = judge(model_type)
    assert verdict.result == RESULTS.get(model_type, verdict.result), verdict.reason
    assert verdict.result != "wrong", verdict.reason


def test_more_than_160_types_are_exact_and_none_is_wrong() -> None:
    results = list(RESULTS.values())
    assert results.count("exact") > 160
    assert results.count("wrong") == 0
