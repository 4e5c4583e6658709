"""Keys: the name of a result, computed from all that decides it.

A value is spelled in canonical JSON (sorted names, no spaces, ASCII) and hashed with SHA-256. Types stay
apart: 1, 1.0, "1" and true have four spellings. NaN, infinities and every type without a canonical
spelling are refused: a key never rests on a repr.
This module knows nothing of models, files or stages.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

SCHEME = "lenspipe-key/1"
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def canonical_json(value: Any) -> str:
    """Spell a value in the one way that keys are computed from.

    Args:
        value: None, bool, int, finite float, str, list, tuple, or dict with str names, nested.

    Raises:
        TypeError: the value, or one inside it, has no canonical spelling.
        ValueError: a float is NaN or infinite, or a text is not Unicode.
    """
    _check(value, "value")
    return _CANONICAL.encode(value)


def _check(value: Any, where: str) -> None:
    kind = type(value)
    if value is None or kind in (bool, int):
        return
    if kind is str:
        value.encode()  # a lone surrogate has no spelling
        return
    if kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: a key can hold finite numbers only")
    elif kind in (list, tuple):
        for i, item in enumerate(value):
            _check(item, f"{where}[{i}]")
    elif kind is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise TypeError(f"{where} has the name {name!r}: names in a key are str")
            _check(item, f"{where}.{name}")
    else:
        raise TypeError(
            f"{where} is of type {kind.__module__}.{kind.__qualname__}, which has no canonical spelling: "
            "convert it to None, bool, int, float, str, list or dict first"
        )


def digest(value: Any) -> str:
    """Hash a value's canonical spelling: 64 hexadecimal characters."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


def artifact_key(stage: str, version: int, inputs: Mapping[str, Any]) -> str:
    """Name the result of one stage: 64 hexadecimal characters.

    Args:
        stage: the stage's verb.
        version: the version of its numbers; raised whenever the stage computes something else.
        inputs: all that decides the result.
    """
    return digest({"scheme": SCHEME, "stage": stage, "version": version, "inputs": dict(inputs)})
