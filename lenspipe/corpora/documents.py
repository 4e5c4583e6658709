"""Document: one input text, or one list of chat messages, with the columns kept from its source.

Sources are .txt, .jsonl, .csv and .parquet files (plain, .gz or .zst) or a data set of the datasets hub; all are
read as streams. A fault is named with its file and line. This module knows neither tokens nor models.
"""

import csv
import glob
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lenspipe.errors import RequestError
from lenspipe.keys import canonical_json, digest
from lenspipe.recipe import Recipe

FORMATS = (".txt", ".jsonl", ".csv", ".parquet")
COMPRESSIONS = (".gz", ".zst")
Value = str | int | float | bool | None
Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus.

    Attributes:
        content: the text, or chat messages with their roles.
        columns: the kept columns' values.
        origin: file and line, for messages.
    """

    content: str | Messages
    columns: Mapping[str, Value]
    origin: str

    @property
    def characters(self) -> int:
        """Length of the text, in characters."""
        if isinstance(self.content, str):
            return len(self.content)
        return sum(len(str(message.get("content", ""))) for message in self.content)

    @property
    def content_digest(self) -> str:
        """Digest of the text or messages alone."""
        return digest(self.content if isinstance(self.content, str) else list(self.content))

    @property
    def column_digest(self) -> str:
        """Digest of the kept columns."""
        return digest({name: _spell(value) for name, value in self.columns.items()})


def _spell(value: Value) -> Any:
    """Give NaN and infinities, which a column may hold and a key may not, a spelling that no other value has."""
    return [repr(value)] if isinstance(value, float) and not math.isfinite(value) else value


def corpus_files(recipe: Recipe) -> list[Path]:
    """List the corpus files in the order they are read: as named, each glob sorted.

    Raises:
        RequestError: nothing matches, or a format that is not read.
    """
    files: list[Path] = []
    for name in recipe.corpus.source:
        pattern = str(recipe.path(name))
        found = [Path(pattern)]
        if not found[0].is_file():
            folder, wanted = Path(recipe.base), str(Path(name).expanduser())
            matches = glob.glob(wanted, root_dir=folder, recursive=True)  # noqa: PTH207 -- Path.glob takes no absolute one
            found = sorted(folder / match for match in matches)
        if not (found := [path for path in found if path.is_file()]):
            raise RequestError(f"corpus.source {name!r}: no file there (looked at {pattern})")
        files += found
    for path in files:
        _format(path)
    return files


def read_documents(recipe: Recipe) -> Iterator[Document]:
    """Read the corpus's documents one by one.

    Raises:
        RequestError: a missing file, column or value, or broken content, named with file and line.
    """
    records = _hub_records(recipe) if recipe.corpus.hub else _file_records(recipe)
    for record, origin in islice(records, recipe.corpus.limit):
        yield _document(record, origin, recipe)


def _file_records(recipe: Recipe) -> Iterator[tuple[Mapping[str, Any], str]]:
    column = recipe.corpus.messages or recipe.corpus.text
    for path in corpus_files(recipe):
        kind = _format(path)
        if kind == ".txt":
            if recipe.corpus.messages or recipe.columns:
                raise RequestError(f"{path} is plain text and has no columns: leave messages, columns and answer out")
            yield from ((({column: text}), origin) for text, origin in _texts(path, recipe.corpus.unit))
        elif kind == ".jsonl":
            yield from _json_lines(path)
        elif kind == ".csv":
            yield from _csv_rows(path)
        else:
            yield from _parquet_rows(path, [column, *recipe.columns])


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise RequestError(
            f"{path}: cannot tell what this is; name files {', '.join(FORMATS)}, plain or with .gz or .zst behind"
        )
    return suffixes[-1]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        compression = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix.lower())
        with pa.input_stream(str(path), compression=compression) as stream:
            for number, line in enumerate(io.BufferedReader(stream), start=1):
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise RequestError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise RequestError(f"cannot read {path}: {error}") from None


def _texts(path: Path, unit: str) -> Iterator[tuple[str, str]]:
    held: list[str] = []
    start = 1
    for number, line in _lines(path):
        blank = not line.strip()
        if unit == "line" and not blank:
            yield line.rstrip("\r\n"), f"{path}, line {number}"
        elif unit == "file" or (unit == "paragraph" and not blank):
            start = start if held else number
            held.append(line)
        elif unit == "paragraph" and held:
            yield "".join(held).rstrip("\r\n"), f"{path}, line {start}"
            held = []
    if unit == "file" or held:
        yield "".join(held).rstrip("\r\n"), f"{path}, line {start}"


def _json_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{origin}: bad JSON ({error})") from None
        if not isinstance(record, dict):
            raise RequestError(f"{origin}: expected one JSON object a line, found {type(record).__name__}")
        yield record, origin


def _csv_rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    csv.field_size_limit(2**31 - 1)  # a document may be longer than csv's own 128 KiB
    reader = csv.DictReader((line for _, line in _lines(path)), strict=True)
    try:
        names = list(reader.fieldnames or ())
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RequestError(f"{path}, line 1: two columns are named {twice[0]!r}; rename one")
        for row in reader:
            origin = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise RequestError(f"{origin}: expected {len(reader.fieldnames or ())} fields, as in the header")
            yield row, origin
    except csv.Error as error:
        raise RequestError(f"{path}, line {reader.line_num}: bad CSV ({error})") from None


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    try:
        if path.suffix.lower() in COMPRESSIONS:
            raise RequestError(f"{path}: parquet files are compressed inside; name it .parquet")
        with pq.ParquetFile(path) as file:
            known = file.schema_arrow.names
            for column in columns:
                _require(column, known, str(path))
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path}, row {number}"
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise RequestError(f"cannot read {path}: {error}") from None


def _hub_records(recipe: Recipe) -> Iterator[tuple[Mapping[str, Any], str]]:
    import datasets  # noqa: PLC0415 -- takes seconds to import, and only hub corpora need it

    corpus = recipe.corpus
    name = str(corpus.hub)
    local = recipe.path(name)
    try:
        found = datasets.load_dataset(
            str(local) if local.is_dir() else name,
            name=corpus.hub_config,
            split=corpus.split,
            revision=corpus.revision,
        )
    except Exception as error:  # datasets raises many kinds, all of which mean the same here
        raise RequestError(f"cannot load the data set {name!r}, split {corpus.split!r}: {error}") from None
    for number, row in enumerate(found, start=1):
        yield row, f"{name} ({corpus.split}), row {number}"


def _require(column: str, known: list[str], origin: str) -> None:
    if column not in known:
        raise RequestError(f"{origin}: no column {column!r}; found {', '.join(known)}")


def _document(record: Mapping[str, Any], origin: str, recipe: Recipe) -> Document:
    column = recipe.corpus.messages or recipe.corpus.text
    for name in (column, *recipe.columns):
        _require(name, list(record), origin)
    content = record[column]
    if recipe.corpus.messages:
        if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
            raise RequestError(f"{origin}: column {column!r} should hold a list of chat messages")
        content = tuple(content)
    elif not isinstance(content, str):
        raise RequestError(f"{origin}: column {column!r} should hold text, found {type(content).__name__}")
    kept = {name: record[name] for name in recipe.columns}
    for name, value in kept.items():
        if not isinstance(value, Value):
            raise RequestError(
                f"{origin}: column {name!r} holds {type(value).__name__}; kept columns are text, numbers or true/false"
            )
    if recipe.read.answer and not (isinstance(kept[recipe.read.answer], str) and kept[recipe.read.answer].strip()):
        raise RequestError(f"{origin}: the answer column {recipe.read.answer!r} should hold text")
    try:
        canonical_json(list(content) if isinstance(content, tuple) else content)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{origin}: column {column!r} holds something that is no text ({error})") from None
    return Document(content, kept, origin)
