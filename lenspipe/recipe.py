"""Recipe: everything a run is asked for; one TOML file, validated once and whole.

Paths in a recipe are relative to the recipe's own folder. Nothing in `[run]` enters a key; everything else
that can change a number does. This module reads no corpus and knows no model.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from lenspipe.errors import RequestError, redacted
from lenspipe.folders import copy_of, is_url
from lenspipe.variables import DEFAULT_MEASURES, MEASURES, VARIABLES, Measure

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", value.strip())
    if not found or found[2] not in _UNITS or found[1].count(".") > 1 or found[1] == ".":
        raise ValueError(f"{value!r} is no amount of bytes: write a number, or a number with KiB, MiB or GiB")
    amount = float(found[1]) * _UNITS[found[2]]
    if amount > 2**60:
        raise ValueError(f"{value[:20]!r} ... is more than there is")
    return int(amount)


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Parts(_Group):
    """`[model.parts]`: parts of a model, named where lenspipe does not find them itself; the gate still decides."""

    blocks: str | None = Field(None, min_length=1, description="the module list of blocks, such as model.layers")
    chain: list[str] | None = Field(
        None, description="modules between the last block and the unembedding, final norm first; [] for none"
    )
    head: str | None = Field(None, min_length=1, description="the unembedding module, such as lm_head")
    multiply: float | None = Field(None, gt=0, allow_inf_nan=False, description="factor on the logits")
    divide: float | None = Field(None, gt=0, allow_inf_nan=False, description="divisor of the logits")
    softcap: float | None = Field(None, gt=0, allow_inf_nan=False, description="cap c of the logits: c tanh(z / c)")

    @property
    def names_arithmetic(self) -> bool:
        """Whether any of the logits' arithmetic is named, which is then all of it."""
        return any((self.multiply, self.divide, self.softcap))


class Model(_Group):
    """`[model]`: whose states are read, and in which arithmetic the model runs."""

    source: str = Field(min_length=1, description="a local folder, a GGUF file, or a hub id")
    revision: str | None = Field(None, description="the hub's branch, tag or commit; the default is main")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="what the model computes in; auto takes the checkpoint's own"
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="attention implementation; auto lets transformers choose"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the checkpoint")
    parts: Parts = Field(Parts(), description="a table [model.parts]: parts of the model by name")


class Corpus(_Group):
    """`[corpus]`: which texts, and how they become sequences of tokens."""

    source: Annotated[list[str], BeforeValidator(_listed)] = Field(
        default=[],
        description=".txt, .jsonl, .csv or .parquet files or globs, also as .gz or .zst",
    )
    hub: str | None = Field(
        None, min_length=1, description="name of a data set for datasets.load_dataset, instead of source"
    )
    hub_config: str | None = Field(None, description="the data set's configuration")
    split: str = Field("train", description="the data set's split")
    revision: str | None = Field(None, description="the data set's revision")
    unit: Literal["file", "paragraph", "line"] = Field("file", description="what one document is in a .txt file")
    text: str = Field("text", description="the column that holds the text")
    messages: str | None = Field(
        None,
        min_length=1,
        description="a column of chat messages, put through the tokenizer's chat template, instead of text; a template "
        "that writes the date is told it is 26 July 2024",
    )
    columns: list[str] = Field(default=[], description="columns to keep, as coordinates on document")
    limit: int | None = Field(None, ge=1, description="read only the first so many documents")
    max_length: int | None = Field(
        None, ge=2, description="tokens in a sequence; the default is 1024, or the model's own limit if that is lower"
    )
    overflow: Literal["split", "truncate", "error"] = Field("split", description="what to do with a longer document")
    stride: int | None = Field(
        None, ge=1, description="new tokens in each window of a split document; less than max_length gives context"
    )
    bos: Literal["auto", "always", "never"] = Field(
        "auto", description="begin sequences with BOS: as the tokenizer does, always, or never"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.source) == (self.hub is not None):
            raise ValueError("name either source (files) or hub (a data set), not both and not neither")
        if self.stride is not None and self.overflow != "split":
            raise ValueError('stride needs overflow = "split"')
        if self.stride is not None and self.max_length is not None and self.stride > self.max_length:
            raise ValueError(f"stride {self.stride} is more than max_length {self.max_length}: tokens would be skipped")
        return self


class Capture(_Group):
    """`[capture]`: which states of the residual stream."""

    sites: Annotated[list[str] | None, BeforeValidator(_listed)] = Field(
        None,
        description="site names (resid_post.3) or kinds (resid_pre, resid_mid, resid_post, attn_out, mlp_out); "
        "the default is the whole stream",
    )
    layers: Literal["all"] | list[int | float] = Field(
        "all", description="depths to keep, 0 to blocks, halves for states inside a block; -1 is the last"
    )
    positions: Literal["all", "last"] | list[int] = Field(
        "all", description="positions in each document to keep; negative counts from its end"
    )
    residuals: Literal["keep", "stream"] = Field(
        "keep", description="store the residuals, so that a later change of [read] needs no forward pass, or not"
    )
    nonfinite: Literal["refuse", "keep"] = Field(
        "refuse",
        description="states and logits with NaN or infinity: refuse the run, or keep and count them, readouts missing",
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        for name in ("sites", "layers", "positions"):
            if getattr(self, name) == []:
                raise ValueError(f"{name} is an empty list: nothing would be read")
        return self


def lens_name(source: str) -> str:
    """Name a lens for people: "logit", or its file's or folder's name."""
    return Path(source).name or source


class Read(_Group):
    """`[read]`: what is computed from each state."""

    lens: Annotated[list[str], BeforeValidator(_listed)] = Field(
        default=["logit"],
        min_length=1,
        description='"logit", or the path of a tuned-lens folder or a Jacobian-lens file; a list reads with each',
    )
    uncovered: Literal["refuse", "logit"] = Field(
        "refuse", description="states for which a lens has no map: refuse the run, or read them by the logit lens"
    )
    precision: Literal["model", "float32"] = Field(
        "model",
        description="round the final norm's result as the model does, or not at all; logits are float32 in both",
    )
    measures: list[Measure] = Field(default=list(DEFAULT_MEASURES), min_length=1, description="what to compute")
    top_k: int = Field(10, ge=1, description="how many of the largest logits to keep")
    tracked: list[str | int] = Field(
        default=[], description="tokens, by string or id, whose logit and rank are kept at every position"
    )
    token_sets: str | None = Field(
        None, description="a TOML or JSON file, name -> tokens, by string or id; the probability of each set is kept"
    )
    answer: str | None = Field(
        None, min_length=1, description="a column with each document's answer, tracked in that document"
    )
    answer_prefix: str = Field(" ", description="put before the answer, unless it begins with white space")

    @field_validator("lens")
    @classmethod
    def _named_apart(cls, lens: list[str]) -> list[str]:
        names = [lens_name(item) for item in lens]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two lenses are called {twice[0]!r}, and the dataset tells them apart by that name")
        return lens


class Run(_Group):
    """`[run]`: where and how; nothing here changes a number, and nothing here enters a key."""

    store: str = Field("lenspipe-store", description="folder of the artifacts, or a URL such as s3://bucket/prefix")
    shard_size: int = Field(200_000, ge=1, description="characters of text in a typical shard, when first cut")
    batch_tokens: int = Field(4096, ge=1, description="tokens, padding included, in one forward pass")
    max_bytes: Annotated[int | None, BeforeValidator(_bytes)] = Field(
        None, ge=1, description='bytes that a run may write at most, by the plan\'s estimate, as 500 or "20 GiB"'
    )
    memory: Annotated[int, BeforeValidator(_bytes)] = Field(
        2**30, ge=2**20, description="bytes that the readout may use for logits, beside the weights"
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1 ...; auto takes cuda where there is one")
    runner: Literal["threads", "dask", "ray"] = Field("threads", description="what carries the tasks")
    workers: int = Field(1, ge=1, description="how many tasks run at once")
    address: str | None = Field(None, description="address of a running Dask or Ray cluster; none starts a local one")
    api: str | None = Field(
        None,
        description="URL of a Prefect server; none uses a private one for the run, and for each worker at an address",
    )


class Recipe(_Group):
    """Everything a run is asked for.

    Attributes:
        base: the folder that relative paths start from.
    """

    model: Model
    corpus: Corpus
    capture: Capture = Capture()
    read: Read = Read()
    run: Run = Run()
    base: str = Field(".", exclude=True)

    @property
    def measures(self) -> frozenset[str]:
        """All measures asked for, `tracked`, `token_sets` and `answer` included."""
        extra = {"tracked"} if self.read.tracked else set()
        extra |= {"token_sets"} if self.read.token_sets else set()
        return frozenset(self.read.measures) | extra | ({"answer"} if self.read.answer else set())

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns kept from the corpus, the answer's included."""
        answer = [self.read.answer] if self.read.answer else []
        return tuple(dict.fromkeys([*self.corpus.columns, *answer]))

    @property
    def store(self) -> Path:
        """The artifact folder; of a store at a URL, the folder in which it is worked on."""
        return copy_of(self.run.store) if is_url(self.run.store) else self.path(self.run.store)

    def path(self, name: str) -> Path:
        """Find a path as this recipe means it: relative to the recipe's folder, with ~ expanded."""
        try:
            # Not Path.resolve: a link keeps the name it has, whose ending says what it holds.
            return Path(os.path.abspath(Path(self.base, Path(name).expanduser())))  # noqa: PTH100
        except RuntimeError as error:
            raise RequestError(f"the path {name!r} cannot be found: {error}") from None

    def as_dict(self) -> dict[str, Any]:
        """All groups as plain values, defaults filled in, without the credentials that a URL may hold."""
        values: dict[str, Any] = self.model_dump(mode="json")
        return values | {"run": {name: redacted(v) if isinstance(v, str) else v for name, v in values["run"].items()}}


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe file.

    Args:
        path: the TOML file.
        overrides: settings such as `read.top_k=20`, whose values are TOML; a bare word is a string.

    Raises:
        RequestError: unreadable, not TOML, or not a valid recipe; all problems are listed.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"no recipe at {path}: give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the recipe {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{path} is not TOML: {error}") from None
    for setting in overrides:
        override(values, setting)
    return make_recipe(values, base=path.parent, origin=str(path))


def make_recipe(values: Mapping[str, Any], base: Path | str = ".", origin: str = "recipe") -> Recipe:
    """Validate plain values as a recipe.

    Raises:
        RequestError: lists every problem, with the nearest known name for an unknown one.
    """
    if "base" in values:
        raise RequestError(
            f"{origin} is not a valid recipe:\n  base: unknown name; known are {', '.join(_known_names(()))}"
        )
    try:
        return Recipe.model_validate({**values, "base": str(Path(base).resolve())})
    except ValidationError as error:
        problems = "\n".join(f"  {_explain(problem)}" for problem in error.errors())
        raise RequestError(f"{origin} is not a valid recipe:\n{problems}") from None


def override(values: dict[str, Any], setting: str) -> None:
    """Change one setting in plain values, such as `read.top_k=20`.

    Raises:
        RequestError: not of that form.
    """
    name, equals, text = setting.partition("=")
    *groups, field = name.strip().split(".")
    if not (equals and groups and field):
        raise RequestError(f"--set {setting!r}: write group.name=value, such as read.top_k=20")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for group in groups:
        values = values.setdefault(group, {})
        if not isinstance(values, dict):
            raise RequestError(f"--set {setting!r}: {group} is not a group of the recipe")
    values[field] = value


def _explain(problem: Any) -> str:
    whole = [str(part) for part in problem["loc"]]
    location = [*whole[:2], *(part for part in whole[2:] if not _is_union_branch(part))]
    name = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _known_names(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        return f"{name}: unknown name; {hint}"
    if problem["type"] == "missing":
        return f"{name}: missing; {_describe(location)}"
    if location[:2] == ["read", "measures"] and problem["type"] == "literal_error":
        brings = [v.measure for v in VARIABLES if v.name == problem["input"] and v.measure in MEASURES]
        near = [str(m) for m in brings] or difflib.get_close_matches(str(problem["input"]), MEASURES, n=1)
        return f"{name}: unknown measure {problem['input']!r}; " + (
            f"did you mean {near[0]!r}?" if near else f"known are {', '.join(MEASURES)}"
        )
    found = "" if isinstance(problem["input"], dict) else f"; found {problem['input']!r}"
    return f"{name or 'recipe'}: {problem['msg'].removeprefix('Value error, ')}{found}"


def _is_union_branch(part: str) -> bool:
    """Tell whether pydantic names a branch of a union here, which a reader of the recipe never wrote."""
    return "[" in part or part in ("str", "int", "float")


def _known_names(location: Sequence[str]) -> list[str]:
    group: Any = Recipe
    for name in location:
        fields = group.model_fields if isinstance(group, type) and issubclass(group, BaseModel) else {}
        group = fields[name].annotation if name in fields else None
    known = list(group.model_fields) if isinstance(group, type) and issubclass(group, BaseModel) else []
    return [name for name in known if name != "base"]


def _describe(location: Sequence[str]) -> str:
    if len(location) == 1:
        return f"a recipe needs a [{location[0]}] group"
    group = Recipe.model_fields[location[0]].annotation
    if isinstance(group, type) and issubclass(group, BaseModel) and location[1] in group.model_fields:
        return group.model_fields[location[1]].description or "it is required"
    return "it is required"
