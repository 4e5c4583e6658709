"""Folders: where lenspipe keeps what is nobody's recipe: its cache, and its copies of stores that are objects.

A store at an URL, such as s3://bucket/prefix, is worked on in a folder here, named after the URL.
"""

import os
from pathlib import Path
from urllib.parse import quote, unquote

from lenspipe.errors import RequestError


def cache_folder() -> Path:
    """Find lenspipe's cache folder: LENSPIPE_CACHE, or lenspipe under XDG_CACHE_HOME or ~/.cache."""
    if named := os.environ.get("LENSPIPE_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lenspipe"


def is_url(location: str) -> bool:
    """Tell a URL from a path."""
    return "://" in location


def copy_of(url: str) -> Path:
    """The folder in which the store at a URL is worked on.

    Raises:
        RequestError: a URL too long for a folder's name.
    """
    name = quote(url.rstrip("/"), safe="")
    if len(name) > 200:
        raise RequestError(f"the store's URL {url} is too long: at most some 150 characters")
    return cache_folder() / "stores" / name


def url_of(root: Path) -> str | None:
    """The URL whose store is worked on in a folder; None for a folder that is a store itself."""
    return unquote(root.name) if root.parent == cache_folder() / "stores" else None
