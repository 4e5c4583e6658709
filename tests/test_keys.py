"""Keys: their spelling is pinned, keeps types apart and refuses what it cannot spell."""

import hashlib
import json
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenspipe.keys import artifact_key, canonical_json, digest

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

# A small alphabet, so that two drawn values are often nearly the same.
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 10**20, 0.0, -0.0, 1.0, 1e20, 1e-7, 0.1]),
    st.sampled_from(
        ["", "0", "1", "1.0", "true", "null", "a", "a,b", '"', '"a":1', "[", "\\", "\n", "é", "\U0001f600"]
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
NAMES = st.one_of(st.sampled_from(["a", "b", "ab", "é", '"', ""]), st.text(st.characters(exclude_categories=["Cs"])))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)


class Colour(StrEnum):
    RED = "red"


def typed(value):
    """Tell values apart as keys should: by type, then by content; dicts regardless of their order."""
    if isinstance(value, list):
        return "list", tuple(typed(item) for item in value)
    if isinstance(value, dict):
        return "dict", frozenset((name, typed(item)) for name, item in value.items())
    return type(value).__name__, repr(value)


@pytest.mark.parametrize(
    "value, spelling",
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        (1, "1"),
        (-7, "-7"),
        (2**80, "1208925819614629174706176"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (0.1, "0.1"),
        (1e100, "1e+100"),
        (5e-324, "5e-324"),
        ("", '""'),
        ("1", '"1"'),
        ('a"\\\n', '"a\\"\\\\\\n"'),
        ("é", '"\\u00e9"'),
        ("\U0001f600", '"\\ud83d\\ude00"'),
        ([], "[]"),
        ({}, "{}"),
        ([1, [2.5, None], "x"], '[1,[2.5,null],"x"]'),
        ((1, 2), "[1,2]"),
        ({"b": 1, "a": {"d": [True], "c": None}}, '{"a":{"c":null,"d":[true]},"b":1}'),
    ],
)
def test_spelling_is_pinned(value, spelling):
    assert canonical_json(value) == spelling


@pytest.mark.parametrize(
    "value, hexadecimal",
    [
        (None, "74234e98afe7498fb5daf1f36ac2d78acc339464f950703b8c019892f982b90b"),
        (1, "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"),
        ("é", "abc3932c9ec58f042750738c49034e7ee67cf556d6be86832ac3dda38decb703"),
        ({"b": [1, 1.0, "1", True], "a": None}, "9c7bf2460cc13cdc2946adc2ccf119d144bb93fa63cd1048736154f37d97e711"),
    ],
)
def test_digest_is_pinned(value, hexadecimal):
    assert digest(value) == hexadecimal


def test_artifact_key_is_pinned():
    found = artifact_key("read", 3, {"top_k": 10, "lens": "logit", "scale": 0.5})
    spelling = '{"inputs":{"lens":"logit","scale":0.5,"top_k":10},"scheme":"lenspipe-key/1","stage":"read","version":3}'
    assert found == hashlib.sha256(spelling.encode("ascii")).hexdigest()
    assert found == "5a471e205490c16ae4efa9fa20b1e65f9df7a9007c0fe7bdaa12de61b25c4597"


def test_stage_version_and_inputs_each_change_the_key():
    keys = {
        artifact_key("read", 1, {"a": 1}),
        artifact_key("capture", 1, {"a": 1}),
        artifact_key("read", 2, {"a": 1}),
        artifact_key("read", 1, {"a": 2}),
        artifact_key("read", 1, {"b": 1}),
        artifact_key("read", 1, {}),
    }
    assert len(keys) == 6


def test_one_one_point_zero_string_and_true_have_four_spellings():
    assert len({canonical_json(value) for value in [1, 1.0, "1", True]}) == 4
    assert len({digest({"x": value}) for value in [1, 1.0, "1", True]}) == 4


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_with_their_place(number):
    with pytest.raises(ValueError, match=r"value\.lens\[1\] is -?(nan|inf)"):
        canonical_json({"lens": [0.5, number]})


@pytest.mark.parametrize(
    "stranger, kind",
    [
        ({1, 2}, "builtins.set"),
        (frozenset("a"), "builtins.frozenset"),
        (b"a", "builtins.bytes"),
        (1j, "builtins.complex"),
        (Path("a"), "pathlib.PosixPath"),
        (np.float64(1.5), "numpy.float64"),
        (np.int64(1), "numpy.int64"),
        (np.bool_(True), "numpy.bool"),
        (np.arange(2), "numpy.ndarray"),
        (Colour.RED, "Colour"),
        (type("Dict", (dict,), {})(a=1), "Dict"),
    ],
)
def test_types_without_a_spelling_are_refused_with_their_place(stranger, kind):
    with pytest.raises(TypeError, match=r"value\.read\.k\[2\] is of type ") as caught:
        canonical_json({"read": {"k": [0, 1, stranger]}})
    assert kind in str(caught.value)


@pytest.mark.parametrize("name", [1, 1.0, None, True, b"a", (1,), Colour.RED])
def test_names_that_are_not_str_are_refused_with_their_place(name):
    with pytest.raises(TypeError, match=r"value\.inner\[0\] has the name "):
        canonical_json({"inner": [{name: 1}]})


@given(VALUES)
def test_spelling_reads_back_as_the_same_value(value):
    assert typed(json.loads(canonical_json(value))) == typed(value)


@given(VALUES, VALUES)
@settings(max_examples=300)
def test_two_values_share_a_spelling_only_if_they_are_one(left, right):
    assert (canonical_json(left) == canonical_json(right)) == (typed(left) == typed(right))
    assert (digest(left) == digest(right)) == (typed(left) == typed(right))


@given(st.dictionaries(NAMES, VALUES, max_size=5), st.randoms())
def test_order_of_names_does_not_matter(value, random):
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)
    assert artifact_key("encode", 1, dict(items)) == artifact_key("encode", 1, value)


@given(VALUES)
def test_spelling_is_one_line_of_ascii(value):
    spelling = canonical_json(value)
    assert spelling.isascii()
    assert spelling.isprintable()
