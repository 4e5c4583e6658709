"""Remote: the objects behind a store's folder, where the store is at a URL: what is there is what counts.

The folder (see folders) is a copy: artifacts are built in it and uploaded, and fetched into it when first used. An
artifact is the object STAGE/ab/abcdef.../manifest.json, written where there is none, which only one can; its payload
lies beside it, below a digest of that manifest, so that another's payload is never touched. obstore talks to the
service, takes credentials from the environment, and tries again, with growing pauses, what may succeed then.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from lenspipe.errors import RequestError, StoreError
from lenspipe.folders import url_of

AT_ONCE = 16
"""Objects that are moved at the same time."""

RETRIES = {"max_retries": 8, "retry_timeout": timedelta(minutes=2)}


@dataclass(frozen=True, slots=True)
class Remote:
    """The objects of one store."""

    url: str

    def get(self, name: str) -> bytes | None:
        """Read an object; None if there is none."""
        with self._asked():
            try:
                return bytes(_service(self.url).get(name).bytes())
            except FileNotFoundError:
                return None

    def put(self, name: str, content: bytes | Path, new: bool = False) -> bool:
        """Write an object; with `new`, only where there is none, and tell whether there was none."""
        with self._asked():
            try:
                _service(self.url).put(name, content, **({"mode": "create"} if new else {}))
            except Exception as error:
                if new and type(error).__name__ == "AlreadyExistsError":
                    return False
                raise
            return True

    def stamp(self, name: str) -> tuple[str, float] | None:
        """What tells one state of an object from the next, and when it was written; None if there is none."""
        with self._asked():
            try:
                found = _service(self.url).head(name)
            except FileNotFoundError:
                return None
            return str(found["e_tag"]), found["last_modified"].timestamp()

    def sizes(self, prefix: str) -> dict[str, int]:
        """List the objects below a prefix: name -> bytes."""
        with self._asked():
            pages = _service(self.url).list(prefix)
            return {item["path"]: item["size"] for page in pages for item in page}

    def delete(self, *names: str) -> None:
        """Delete objects, whether or not they are there."""
        for name in names:
            with self._asked(), _forgiving():
                _service(self.url).delete(name)

    def upload(self, folder: Path, names: Iterable[str], prefix: str) -> None:
        """Write files of a folder below a prefix."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(self.put, f"{prefix}{name}", folder / name) for name in names]:
                done.result()

    def download(self, prefix: str, names: Iterable[str], folder: Path) -> None:
        """Read objects below a prefix into a folder; those that are not there are left out."""

        def fetch(name: str) -> None:
            if (content := self.get(f"{prefix}{name}")) is not None:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(fetch, name) for name in names]:
                done.result()

    def move(self, prefix: str, to: str, first: str) -> None:
        """Give all objects below a prefix another, the one named `first` before all others."""
        for name in sorted(self.sizes(prefix), key=lambda name: name != f"{prefix}{first}"):
            with self._asked(), _forgiving():
                _service(self.url).rename(name, f"{to}{name.removeprefix(prefix)}")

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Turn the service's errors into ours.

        Raises:
            StoreError: it cannot be reached, or refuses.
        """
        try:
            yield
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "obstore":
                raise
            said = " ".join(
                re.sub(r"<\?xml.*<Code>(\w+)</Code>.*|Debug source.*", r"\1", str(error), flags=re.S).split()
            )
            raise StoreError(
                f"the store {self.url} cannot be read or written: {said[:600]}. What was finished before is safe: "
                "see to the address and the credentials (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...), and run again"
            ) from error


@contextmanager
def _forgiving() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        return


@cache
def _service(url: str) -> Any:
    try:
        from obstore import store as services  # noqa: PLC0415 -- an optional extra
    except ImportError:
        raise RequestError(f'the store is at {url}: install what reads it with pip install "lenspipe[s3]"') from None
    by_url: Any = services.from_url
    try:
        return by_url(url, retry_config=RETRIES, client_options={"allow_http": True})
    except Exception as error:
        raise RequestError(f"{url} is no place for a store: {error}") from None


@cache
def remote_behind(root: Path) -> Remote | None:
    """The objects behind a store's folder; None where the folder is the store."""
    url = url_of(root)
    return None if url is None else Remote(url)


_listed: dict[tuple[str, str], dict[str, dict[str, int]]] = {}
"""Listings of whole stages, for as long as one plans: thousands of artifacts are a few requests."""


def listing(remote: Remote, stage: str, manifest: str) -> dict[str, dict[str, int]]:
    """List a stage's artifacts, those with a manifest: key -> its files and their bytes; remembered until `forget`."""
    if (remote.url, stage) not in _listed:
        found: dict[str, dict[str, int]] = {}
        for name, size in remote.sizes(stage).items():
            key, _, file = name.removeprefix(f"{stage}/").partition("/")[2].partition("/")
            found.setdefault(key, {})[file] = size
        _listed[remote.url, stage] = {key: files for key, files in found.items() if manifest in files}
    return _listed[remote.url, stage]


def forget(remote: Remote) -> None:
    """Forget the listings of a store, which has changed or may have."""
    for known in [name for name in _listed if name[0] == remote.url]:
        del _listed[known]
