"""Files: a lens on disk, recognised by what it holds.

Three formats are known: tuned-lens (config.json beside params.pt, or params.safetensors), the state dict of tuned-lens
before 0.1 ("legacy"), and the Jacobian lens (a fitted one or a checkpoint of its fit). Recognising and hashing import
no torch; nothing here runs code that comes with a file.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lenspipe.errors import RequestError
from lenspipe.keys import digest
from lenspipe.lenses.contents import Contents, contents_of

if TYPE_CHECKING:
    from lenspipe.lenses.lens import Lens

Format = Literal["tuned-lens", "legacy tuned-lens", "Jacobian lens"]

KNOWN = (
    "a tuned-lens folder (config.json with params.pt or params.safetensors), a legacy tuned-lens state dict "
    "(layer_translators.*), or a Jacobian lens (torch.save of J, or of jacobian_sum)"
)
_LINEAR = "linear_tuned_lens"
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class TunedConfig:
    """What in a tuned lens's config.json changes numbers.

    Attributes:
        d_model: width of the residual stream.
        num_hidden_layers: blocks of the model, and translators in the file.
        bias: whether translators have one; None where the config does not say.
        lens_type: linear_tuned_lens.
    """

    d_model: int
    num_hidden_layers: int
    bias: bool | None
    lens_type: str


@dataclass(frozen=True, slots=True)
class LensFile:
    """A recognised lens.

    Attributes:
        name: of the path that was asked for, for people.
        format: one of three.
        numbers: the file that holds its tensors.
        contents: what that file holds.
        config: of a tuned-lens folder, otherwise None.
    """

    name: str
    format: Format
    numbers: Path
    contents: Contents
    config: TunedConfig | None


def lens_digest(path: Path) -> str:
    """Hash all that decides a lens's numbers: 64 hexadecimal characters. Imports no torch.

    The file of its tensors counts byte for byte, and so do d_model, num_hidden_layers, bias and lens_type of a
    config.json. The names of files and folders, and which model a config names, do not.

    Raises:
        RequestError: there is no lens of a known format at the path, or it would run code if it were loaded.
    """
    with _readable(path):
        found = recognise(path)
        with found.numbers.open("rb") as file:
            numbers = hashlib.file_digest(file, "sha256").hexdigest()
    config = None if found.config is None else asdict(found.config)
    return digest({"format": found.format, "config": config, "numbers": numbers})


def load_lens(path: Path, d_model: int, n_blocks: int) -> "Lens":
    """Load a lens for a model, its layers renumbered to the number of blocks applied.

    Args:
        path: a folder or a file in a known format.
        d_model: width of the model's residual stream.
        n_blocks: blocks of the model.

    Raises:
        RequestError: there is no lens of a known format at the path, it is damaged or contradicts itself, it would
            run code if it were loaded, or it belongs to another model.
    """
    from lenspipe.lenses.lens import Lens  # noqa: PLC0415 -- planning imports this module and not torch
    from lenspipe.lenses.translators import translators_of  # noqa: PLC0415

    with _readable(path):
        found = recognise(path)
        translators = translators_of(found, d_model, n_blocks)
    return Lens(found.name, "jacobian" if found.format == "Jacobian lens" else "tuned", translators, n_blocks)


def recognise(path: Path) -> LensFile:
    """Find out which format lies at a path, from what the files hold and not from their names.

    Raises:
        RequestError: nothing is there, or nothing that is known.
        OSError: it cannot be read.
    """
    name = path.name or path.resolve().name
    if path.is_dir():
        numbers = _numbers_in(path)
    elif path.is_file():
        numbers = path
    else:
        found = "a link to nothing" if path.is_symlink() else "no file or folder" if path.exists() else "nothing"
        raise RequestError(f"no lens at {path}: expected {KNOWN}, found {found}; check read.lens")
    contents = contents_of(numbers)
    if {"J", "jacobian_sum"} & set(contents.names):
        return LensFile(name, "Jacobian lens", numbers, contents, None)
    if any(text.startswith("layer_translators.") for text in contents.names):
        return LensFile(name, "legacy tuned-lens", numbers, contents, None)
    if any(re.fullmatch(r"\d+\.(weight|bias)", text) for text in contents.names):
        config = path / "config.json"
        if not path.is_dir() or not config.is_file():
            raise RequestError(f"{numbers} holds a tuned lens without its config.json: name the folder that has both")
        return LensFile(name, "tuned-lens", numbers, contents, _read_config(config))
    texts = [text for text in contents.names if text not in ("storage", "cpu") and not text.isdigit()]
    raise RequestError(f"{numbers} is no lens: expected {KNOWN}, found {_some(texts)}")


def _numbers_in(folder: Path) -> Path:
    held = sorted(folder.iterdir())
    candidates = [path for path in held if path.suffix in _ENDINGS]
    candidates = [path for path in candidates if path.stem == "params"] or candidates
    if len(candidates) == 1 and candidates[0].is_file():
        return candidates[0]
    found = _some([path.name + ("" if path.is_file() else " (not a file)") for path in held])
    if len(candidates) > 1:
        names = " and ".join(path.name for path in candidates[:2])
        raise RequestError(
            f"the folder {folder} holds more than one file of tensors ({names}): expected one lens; "
            "keep one of them, or name the file instead of the folder"
        )
    raise RequestError(f"no lens in the folder {folder}: expected {KNOWN}, found {found}")


def _read_config(path: Path) -> TunedConfig:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON ({error}): copy or download it again") from error
    if not isinstance(values, dict):
        raise RequestError(f"{path} holds a {type(values).__name__}, but a tuned lens's config is an object with names")
    lens_type = values.get("lens_type", _LINEAR)
    if lens_type != _LINEAR:
        raise RequestError(f"{path} says lens_type {lens_type!r}: only {_LINEAR!r} can be read")
    for name in ("d_model", "num_hidden_layers"):
        if type(values.get(name)) is not int or values[name] < 1:
            raise RequestError(f"{path} says {name} {values.get(name)!r}: a tuned lens's config has a positive number")
    bias = values.get("bias")
    if bias is not None and not isinstance(bias, bool):
        raise RequestError(f"{path} says bias {bias!r}: expected true or false")
    return TunedConfig(values["d_model"], values["num_hidden_layers"], bias, _LINEAR)


def _some(names: list[str]) -> str:
    """List the first few names."""
    if not names:
        return "nothing"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(f"the lens {path} cannot be read: {error}") from error
