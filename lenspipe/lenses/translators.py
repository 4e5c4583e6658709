"""Translators: the maps in a lens file, checked against the model and numbered by blocks applied.

Shapes: D width. tuned-lens numbers a map by the block that its state enters: i is layer i. In its legacy state dict
input_translator is layer 0 and layer_translators.i is layer i + 1. The Jacobian lens numbers a map by the block that
its state leaves: l is layer l + 1.
This module knows no model; it takes two numbers.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lenspipe.errors import RequestError
from lenspipe.lenses.contents import verify
from lenspipe.lenses.files import LensFile, TunedConfig
from lenspipe.lenses.lens import Translator

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WRONG_MODEL = "this lens belongs to another model; name the one made for this model"
_TUNED = re.compile(r"(0|[1-9][0-9]{0,5})\.(weight|bias)")
_LEGACY = re.compile(r"(?:input_translator|layer_translators\.(0|[1-9][0-9]{0,5}))\.(weight|bias)")
_LEGACY_UNEMBED = ("layer_norm.", "unembedding.")


def translators_of(found: LensFile, d_model: int, n_blocks: int) -> dict[int, Translator]:
    """Read a lens's maps: layer -> map, float32, every number finite.

    Args:
        found: a recognised lens.
        d_model: width of the model's residual stream.
        n_blocks: blocks of the model.

    Raises:
        RequestError: the file is damaged, contradicts itself, or belongs to another model.
    """
    values = _load(found)
    if found.format == "Jacobian lens":
        return _jacobian(values, found.numbers, d_model, n_blocks)
    if found.config is not None:
        return _tuned(values, found.config, found.numbers, d_model, n_blocks)
    return _legacy(values, found.numbers, d_model, n_blocks)


def _load(found: LensFile) -> dict[Any, Any]:
    path = found.numbers
    if found.contents.container == "torch":
        verify(path)
    try:
        if found.contents.container == "safetensors":
            return load_file(path)
        # Mapped, so that shapes are checked before any number is read.
        values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # both libraries raise many kinds for a file they cannot read
        # torch's own text for a pickle advises to let it run.
        unsafe = isinstance(error, UnpicklingError)
        reason = "it holds something else" if unsafe else str(error).strip().split("\n")[0]
        raise RequestError(
            f"{path} cannot be loaded as plain tensors ({reason}): nothing of it was run; copy it again, "
            "or load it where its origin is trusted and save plain tensors"
        ) from error
    if not isinstance(values, dict):
        raise RequestError(f"{path} holds a {type(values).__name__}: a lens is a dict of tensors")
    return values


def _tuned(
    values: Mapping[Any, Any], config: TunedConfig, path: Path, d_model: int, n_blocks: int
) -> dict[int, Translator]:
    _require(config.d_model, d_model, "d_model", path.with_name("config.json"))
    _require(config.num_hidden_layers, n_blocks, "num_hidden_layers", path.with_name("config.json"))
    parts = {"weight": dict[int, Any](), "bias": dict[int, Any]()}
    for name, value in values.items():
        match = _TUNED.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise _unknown(name, "'0.weight', '0.bias', '1.weight' ...", path)
        parts[match[2]][int(match[1])] = value
    weights, biases = parts["weight"], parts["bias"]
    if config.bias is not None and config.bias != bool(biases):
        raise RequestError(
            f"{path} holds {len(biases)} biases, but its config.json says bias {str(config.bias).lower()}: "
            "one of the two is of another lens"
        )
    _require_layers(weights, biases, range(n_blocks), path)
    return _pair(weights, biases, path, d_model)


def _legacy(values: Mapping[Any, Any], path: Path, d_model: int, n_blocks: int) -> dict[int, Translator]:
    parts = {"weight": dict[int, Any](), "bias": dict[int, Any]()}
    for name, value in values.items():
        if isinstance(name, str) and name.startswith(_LEGACY_UNEMBED):
            continue  # copies of the model's own final norm and unembedding
        match = _LEGACY.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise _unknown(
                name, "linear translators: 'input_translator.weight', 'layer_translators.0.weight' ...", path
            )
        parts[match[2]][0 if match[1] is None else int(match[1]) + 1] = value
    weights, biases = parts["weight"], parts["bias"]
    # Legacy lenses may or may not bring a map for the last layer.
    _require_layers(weights, biases, range(n_blocks + (n_blocks in weights)), path)
    return _pair(weights, biases, path, d_model)


def _pair(weights: Mapping[int, Any], biases: Mapping[int, Any], path: Path, d_model: int) -> dict[int, Translator]:
    return {
        layer: Translator(
            _numbers(weights[layer], (d_model, d_model), f"the weight of layer {layer} in {path}"),
            _numbers(biases[layer], (d_model,), f"the bias of layer {layer} in {path}") if biases else None,
            residual=True,
        )
        for layer in sorted(weights)
    }


def _jacobian(values: Mapping[Any, Any], path: Path, d_model: int, n_blocks: int) -> dict[int, Translator]:
    name = "J" if "J" in values else "jacobian_sum"
    jacobians = values.get(name)
    if not isinstance(jacobians, dict) or {"J", "jacobian_sum"} <= set(values):
        raise RequestError(
            f"{path} is no Jacobian lens: expected either J or jacobian_sum, a dict of one matrix per layer; "
            f"found {', '.join(f'{key}: {type(value).__name__}' for key, value in values.items())}"
        )
    if beside := [key for key, value in values.items() if key != name and _holds_tensor(value)]:
        raise RequestError(f"{path} holds tensors under {beside[0]!r} beside {name}: such a variant is not known")
    if "d_model" in values:
        _require(values["d_model"], d_model, "d_model", path)
    _require_blocks(jacobians, values, name, path, n_blocks)
    divisor = _prompts_done(values, path) if name == "jacobian_sum" else None
    found = {}
    for block, value in sorted(jacobians.items()):
        weight_DD = _numbers(value, (d_model, d_model), f"{name}[{block}] in {path}")
        found[block + 1] = Translator(weight_DD if divisor is None else weight_DD / divisor, None, residual=False)
    return found


def _require_blocks(
    jacobians: Mapping[Any, Any], values: Mapping[Any, Any], name: str, path: Path, n_blocks: int
) -> None:
    if odd := [block for block in jacobians if type(block) is not int]:
        raise RequestError(f"{path} has the layer {odd[0]!r} in {name}: layers are whole numbers")
    if not jacobians:
        raise RequestError(f"{path} has no layer in {name}: the lens is empty")
    blocks = sorted(jacobians)
    if not 0 <= blocks[0] <= blocks[-1] < n_blocks:
        raise RequestError(
            f"{path} has matrices for blocks {blocks[0]} to {blocks[-1]}, but the model has blocks 0 to "
            f"{n_blocks - 1}: {_WRONG_MODEL}"
        )
    sources = values.get("source_layers", blocks)
    if not isinstance(sources, list | tuple) or any(type(one) is not int for one in sources):
        raise RequestError(
            f"{path} has source_layers {sources!r}: expected a list of layers, those of {name}: {blocks}"
        )
    if sorted(sources) != blocks:
        raise RequestError(
            f"{path} says source_layers {sorted(sources)}, but {name} has layers {blocks}: "
            "the file contradicts itself; fit or download the lens again"
        )
    if values.get("target_layer", n_blocks - 1) != n_blocks - 1:
        raise RequestError(
            f"{path} leads to the state that leaves block {values['target_layer']!r}, but only the last one, of block "
            f"{n_blocks - 1}, can be unembedded: name a lens to the last state of this model"
        )


def _prompts_done(values: Mapping[Any, Any], path: Path) -> int:
    done = values.get("n_done")
    if type(done) is not int or done < 1:
        raise RequestError(
            f"{path} has jacobian_sum and n_done {done!r}: the sum is divided by the number of prompts done, "
            "which is at least 1; go on with the fit first"
        )
    return done


def _require(found: object, expected: int, what: str, path: Path) -> None:
    if type(found) is not int or found != expected:
        raise RequestError(f"{path} says {what} {found!r}, but the model asks for {expected}: {_WRONG_MODEL}")


def _require_layers(weights: Mapping[int, Any], biases: Mapping[int, Any], expected: range, path: Path) -> None:
    if sorted(weights) != list(expected):
        raise RequestError(
            f"{path} has translators for layers {sorted(weights)}, but the model asks for layers "
            f"{expected.start} to {expected.stop - 1}, each of them: {_WRONG_MODEL}"
        )
    if biases and set(biases) != set(weights):
        odd = sorted(set(biases) ^ set(weights))
        raise RequestError(f"{path} has a weight or a bias alone at layers {odd}: expected biases for all or for none")


def _numbers(value: object, shape: tuple[int, ...], what: str) -> Tensor:
    """Copy a tensor out of its file as float32."""
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS or not _is_plain(value):
        kind = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__
        raise RequestError(f"{what} is {kind}: expected a dense tensor of floating-point numbers")
    if value.shape != shape:
        raise RequestError(
            f"{what} has shape {list(value.shape)}, but the model asks for {list(shape)}: a lens for one "
            f"head or to another width cannot be read; otherwise {_WRONG_MODEL}"
        )
    numbers = value.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if not bool(numbers.isfinite().all()):
        raise RequestError(f"{what} holds NaN or a number beyond float32: the lens is broken; fit or download it again")
    return numbers


def _is_plain(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_nested and value.device.type == "cpu"


def _holds_tensor(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensor(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(one) for one in value)
    return isinstance(value, Tensor)


def _unknown(name: object, expected: str, path: Path) -> RequestError:
    return RequestError(f"{path} holds {name!r}, which is no part of a lens that can be read: expected {expected}")
