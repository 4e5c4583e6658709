"""Token sets: named lists of tokens, from a file that a user writes: TOML or JSON, name -> [token, ...].

A token is an id or a string. Which id a string is, the tokenizer says; nothing is known of it here.
"""

import json
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from lenspipe.errors import RequestError


def load_token_sets(path: Path) -> dict[str, list[str | int]]:
    """Read a file of token sets.

    Raises:
        RequestError: no such file, another format, or anything but names with lists of different tokens.
    """
    try:
        return _parsed(path, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"cannot read the token sets of {path}: {error}; write one line a set in a TOML file, as in\n"
            'french = [" le", " la"]'
        ) from None


@lru_cache(maxsize=4)  # of the text, so that a changed file is read anew
def _parsed(path: Path, text: str) -> dict[str, list[str | int]]:
    values: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    if not isinstance(values, dict) or not values:
        raise RequestError(f'{path} holds no token sets: write a name and its tokens, as in colours = [" red", 314]')
    for name, tokens in values.items():
        if not isinstance(tokens, list) or not tokens or not all(_is_token(token) for token in tokens):
            raise RequestError(
                f"{path}: the set {name!r} must be a list of tokens, strings or ids; found {tokens!r:.80}"
            )
        if twice := [token for i, token in enumerate(tokens) if token in tokens[:i]]:
            raise RequestError(f"{path}: the set {name!r} holds {twice[0]!r} twice: name each token once")
    return values


def _is_token(token: object) -> bool:
    return (isinstance(token, int) and not isinstance(token, bool)) or (isinstance(token, str) and token != "")
