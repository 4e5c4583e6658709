"""Structure: where a model keeps its blocks, final norm and unembedding, found by watching it run.

Nothing is found by name. The blocks are the module list as long as the model is deep whose members hand one state
on; what stands between the last block and the unembedding is traced back from what the unembedding is given. What
this finds is a conjecture: the gate proves it or refuses the model.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lenspipe.errors import ModelError, RequestError
from lenspipe.models.watching import Call, Port, factor, same, watch
from lenspipe.recipe import Parts

LONGEST_CHAIN = 6
READABLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Structure:
    """The parts of a causal language model that a lens needs.

    Attributes:
        blocks: in order.
        port: where the state goes in and out of them.
        chain: modules between the last block's output and the unembedding: final norm, projection; may be empty.
        head: the unembedding module, with weight [V, D] and perhaps a bias.
        dtype: what the chain is given.
        d_model: width of the state.
    """

    blocks: tuple[nn.Module, ...]
    port: Port
    chain: tuple[nn.Module, ...]
    head: Any
    dtype: torch.dtype
    d_model: int


class Scale(nn.Module):
    """A multiplication that a model does between its modules."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, state: Tensor) -> Tensor:
        """Multiply."""
        return state * self.factor


def _inside(wrapper: nn.Module, head: nn.Module) -> nn.Module:
    """Copy a module that holds the unembedding, and let it end before that."""
    return copy.deepcopy(wrapper, {id(head): nn.Identity()})


def probe_ids(model: Any, length: int = 16) -> Tensor:
    """Make one sequence of token ids, the same every time, without those that stand for images: int64 [1, length]."""
    config = model.config.get_text_config(decoder=True)
    n_ids = int(model.get_input_embeddings().weight.shape[0])
    named = [v for held in (model.config, config) for k, v in vars(held).items() if re.search("token_(id|index)$", k)]
    special = {i for value in named for i in (value if isinstance(value, list) else [value])}
    plain = [i for i in range(min(n_ids, 10_000)) if i not in special] or [0]
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, len(plain), (1, length), generator=generator)
    return torch.tensor(plain)[places].to(model.get_input_embeddings().weight.device)


def depths(config: Any) -> list[int]:
    """List what a config may mean by the model's depth, most telling first."""
    text = config.get_text_config(decoder=True)
    names = ("decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    found = [getattr(held, name, None) for held in (text, config) for name in names]
    return list(dict.fromkeys(int(n) for n in found if isinstance(n, int) and n > 0))


def run(model: Any, ids: Tensor) -> Any:
    """Run a model on whole sequences, without a cache."""
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def find_structure(model: Any, parts: Parts, ids: Tensor, n_blocks: int | None = None) -> Structure:
    """Find blocks, chain and head of a transformers causal language model.

    Args:
        model: on its device, in evaluation mode.
        parts: what the user names, which is taken as said.
        ids: the probe.
        n_blocks: the depth, where it is known; else the config's.

    Raises:
        RequestError: a name in parts that the model does not have.
        ModelError: the model has no such parts, saying which is missing.
    """
    name = type(model).__name__
    with watch(model) as calls:
        run(model, ids)
    head = require_unembedding(model, parts)
    if not any(call.module is head for call in calls):
        raise ModelError(f"{name} does not run its unembedding {type(head).__name__} as a module: nothing to read with")
    asked = [n_blocks] if n_blocks else depths(model.config)
    if parts.blocks:
        lists: list[Any] = [_named(model, parts.blocks, "blocks")]
        if not isinstance(lists[0], nn.ModuleList):
            raise RequestError(f"model.parts.blocks {parts.blocks!r} is no module list: name the list of blocks")
    else:
        held = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        lists = [group for depth in asked for group in held if len(group) == depth]
    if not lists:
        depth = " or ".join(map(str, asked)) or "unknown number of"
        raise ModelError(
            f"{name} has no list of {depth} blocks, which is its depth by its config: name the list in "
            "model.parts.blocks, if there is one"
        )
    chain = None if parts.chain is None else [_named(model, part, "chain") for part in parts.chain]
    problems: list[str] = []
    for group in lists:
        try:
            blocks = tuple(group)
            port, state = _find_port(calls, blocks, ids)
            traced = _trace(calls, blocks[-1], head, state) if chain is None else (chain, state.dtype)
        except ModelError as error:
            problems.append(str(error))
        else:
            return Structure(blocks, port, tuple(traced[0]), head, traced[1], state.shape[-1])
    raise ModelError(f"{name}: {problems[0]}")


def _named(model: nn.Module, name: str, part: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        parent = name.rpartition(".")[0]
        try:
            known = [child for child, _ in model.get_submodule(parent).named_children()]
        except AttributeError:
            parent, known = "", [child for child, _ in model.named_children()]
        raise RequestError(
            f"model.parts.{part}: {type(model).__name__} has no {name!r}; {parent or 'it'} has {', '.join(known)}"
        ) from None


def require_unembedding(model: Any, parts: Parts) -> Any:
    """Return the unembedding module, if it can be read as numbers.

    Raises:
        RequestError: the model has no module of the name given.
        ModelError: there is none, or it is quantised.
    """
    name = type(model).__name__
    head: Any = None
    if parts.head:
        head = _named(model, parts.head, "head")
    elif callable(getattr(model, "get_output_embeddings", None)):
        head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2:
        named = f": {parts.head} has no weight [V, D]" if parts.head else ": load a ...ForCausalLM class"
        raise ModelError(f"{name} has no unembedding matrix to read with{named}")
    if weight.dtype not in READABLE:
        raise ModelError(f"the unembedding of {name} is quantised ({weight.dtype}): load the model in float")
    return head


def _find_port(calls: Sequence[Call], blocks: Sequence[nn.Module], ids: Tensor) -> tuple[Port, Tensor]:
    """Find how the blocks hand on the state, and the state that the last one lets out."""
    runs = [[call for call in calls if call.module is block] for block in blocks]
    if idle := [str(i) for i, found in enumerate(runs) if not found]:
        raise ModelError(f"of its {len(blocks)} blocks, {', '.join(idle)} do not run on a text alone")
    if repeated := [i for i, found in enumerate(runs) if len(found) > 1]:
        raise ModelError(
            f"block {repeated[0]} runs {len(runs[repeated[0]])} times in one pass: a looped model has no one state "
            "per block"
        )
    steps = [found[0] for found in runs]
    ports: list[Port] | None = None
    for before, after in pairwise(steps):
        if after.begun < before.ended:
            raise ModelError("the blocks do not run one after another")
        found = [Port(a, o) for a, given in after.given for o, state in before.returned if _stream(given, state)]
        ports = found if ports is None else [port for port in ports if port in found]
        if not ports:
            _require_finite(before)
            raise ModelError(
                f"what block {steps.index(after)} is given is not what block {steps.index(before)} returned: there are "
                "several residual streams, or arithmetic between the blocks, and no single state to read"
            )
    if ports is None:  # a single block
        ports = [Port(a, o) for a, given in steps[0].given for o, state in steps[0].returned if given.dim() == 3]
        if not ports:
            raise ModelError("the only block passes no hidden state")
    port = ports[0]
    state = dict(steps[-1].returned).get(port.output)
    if state is None or not any(place == port.argument for place, _ in steps[0].given):
        raise ModelError("the blocks do not pass the hidden state all in one way")
    if state.dim() != 3 or state.shape[:2] != ids.shape:
        raise ModelError(
            f"on {ids.shape[1]} tokens, block outputs have shape {tuple(state.shape)}, expected [1, {ids.shape[1]}, "
            "width]: there is no single residual stream with a state per token"
        )
    _require_finite(steps[-1])
    return port, state


def _require_finite(step: Call) -> None:
    if any(not torch.isfinite(state).all() for _, state in step.returned if state.dim() >= 3):
        raise ModelError("a block's output holds NaN or infinity on a probe text: the weights are broken")


def _stream(given: Tensor, state: Tensor) -> bool:
    return given.shape == state.shape and given.dim() >= 3 and same(given, state)


def _trace(
    calls: Sequence[Call], last_block: nn.Module, head: nn.Module, state: Tensor
) -> tuple[list[nn.Module], torch.dtype]:
    """Trace what the head is given back to the last block's state: the chain, and the dtype it is given."""
    end = next(call.ended for call in calls if call.module is last_block)
    # A module with several inputs cannot be repeated from the state alone.
    after = [call for call in calls if call.begun > end and len(call.given) == 1 and call.module is not head]
    wrappers = [call for call in after if any(module is head for module in call.module.modules())]
    between = [call for call in after if call not in wrappers]
    for call in (call for call in reversed(calls) if call.module is head and call.begun > end):
        for _, given in call.given:
            for chain, dtype in _paths(between, given, state, call.begun, LONGEST_CHAIN):
                return chain, dtype
    for call in reversed(wrappers):  # what happens inside one is repeated with it
        for chain, dtype in _paths(between, call.given[0][1], state, call.begun, LONGEST_CHAIN):
            return [*chain, _inside(call.module, head)], dtype
    raise ModelError(
        f"the output of the last block ({type(last_block).__name__}) does not reach the unembedding "
        f"({type(head).__name__}) through modules alone: there is arithmetic in between that cannot be repeated"
    )


def _paths(
    calls: Sequence[Call], wanted: Tensor, state: Tensor, before: int, most: int
) -> Iterator[tuple[list[nn.Module], torch.dtype]]:
    """Yield the ways from the state to a tensor: outermost modules first, exact steps before scaled ones."""
    if same(wanted, state):
        yield [], wanted.dtype
        return
    for exact in (True, False):
        if not exact and (c := factor(wanted, state)) is not None:
            yield [Scale(c)], wanted.dtype
        for call in calls:
            if call.begun >= before or not most:
                continue
            for _, returned in call.returned:
                c = (1.0 if same(wanted, returned) else None) if exact else factor(wanted, returned)
                if c is None:
                    continue
                for _, given in call.given:
                    for chain, dtype in _paths(calls, given, state, call.begun, most - 1):
                        yield [*chain, call.module, *([] if exact else [Scale(c)])], dtype
