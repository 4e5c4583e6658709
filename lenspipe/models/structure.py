"""Structure: where a model keeps its blocks, final norm and unembedding, found by watching it run.

Nothing is found by name. The blocks are the module list as long as the model is deep; what stands between the last
block and the unembedding is the chain of modules through which the last block's output is seen to pass. What
this finds is a conjecture: the gate proves it or refuses the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lenspipe.errors import ModelError
from lenspipe.kernels.readout import Arithmetic


@dataclass(frozen=True)
class Structure:
    """The parts of a causal language model that a lens needs.

    Attributes:
        blocks: in order.
        chain: modules between the last block's output and the unembedding: final norm, projection; may be empty.
        head: the unembedding module, with weight [V, D] and perhaps a bias.
    """

    blocks: tuple[nn.Module, ...]
    chain: tuple[nn.Module, ...]
    head: nn.Module


@dataclass
class Call:
    """One call of a module, as a hook sees it."""

    module: nn.Module
    given: Tensor | None
    returned: Tensor | None = None


def first_tensor(value: Any) -> Tensor | None:
    """Find the hidden state in what a module takes or returns: itself, or the first of a tuple."""
    if isinstance(value, tuple):
        value = value[0] if value else None
    return value if isinstance(value, Tensor) else None


def block_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Find the hidden state among a module's arguments."""
    return first_tensor(args) if args else first_tensor(kwargs.get("hidden_states"))


def probe_ids(vocab_size: int, length: int = 16) -> Tensor:
    """Make one sequence of token ids, the same every time: int64 [1, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (1, length), generator=generator)


def find_structure(model: Any, n_blocks: int, vocab_size: int) -> Structure:
    """Find blocks, chain and head of a transformers causal language model.

    Raises:
        ModelError: the model has no such parts, saying which is missing.
    """
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None or weight.dim() != 2:
        raise ModelError(f"{type(model).__name__} has no unembedding matrix to read with")
    if not weight.is_floating_point():
        raise ModelError(f"the unembedding of {type(model).__name__} is quantised ({weight.dtype}): use a float model")
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == n_blocks]
    if not lists:
        raise ModelError(f"{type(model).__name__} has no list of {n_blocks} blocks, its depth by its config")
    with _watch(model) as calls, torch.no_grad():
        ids = probe_ids(vocab_size).to(weight.device)
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    called = {id(call.module) for call in calls}
    blocks = next((tuple(group) for group in lists if all(id(block) in called for block in group)), None)
    if blocks is None:
        raise ModelError(f"no list of {n_blocks} blocks in {type(model).__name__} is run on a text: nothing to read")
    return Structure(blocks, _chain(calls, blocks[-1], head), head)


@contextmanager
def _watch(model: nn.Module) -> Iterator[list[Call]]:
    calls: list[Call] = []
    open_calls: dict[int, Call] = {}

    def start(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        open_calls[id(module)] = Call(module, block_input(args, kwargs))
        calls.append(open_calls[id(module)])

    def end(module: nn.Module, _args: Any, output: Any) -> None:
        open_calls[id(module)].returned = first_tensor(output)

    handles = [module.register_forward_pre_hook(start, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(end) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _chain(calls: list[Call], last_block: nn.Module, head: nn.Module) -> tuple[nn.Module, ...]:
    inside = {id(module) for module in last_block.modules()}
    at = max(i for i, call in enumerate(calls) if id(call.module) in inside)
    state = next(call.returned for call in calls if call.module is last_block)
    if state is not None and not torch.isfinite(state).all():
        raise ModelError("the last block's output holds NaN or infinity on a probe text: the weights are broken")
    chain: list[nn.Module] = []
    for call in calls[at + 1 :]:
        if not _same(call.given, state):
            continue
        if call.module is head:
            return tuple(chain)
        if any(module is head for module in call.module.modules()):
            continue  # a wrapper around the head: what it does inside follows
        chain.append(call.module)
        state = call.returned
    raise ModelError(
        f"the output of the last block ({type(last_block).__name__}) does not reach the unembedding "
        f"({type(head).__name__}) through modules alone: there is arithmetic in between that cannot be repeated"
    )


def _same(given: Tensor | None, state: Tensor | None) -> bool:
    """Tell whether a module was given this state: all of it or its last positions, perhaps in another dtype."""
    if given is None or state is None or given.shape[-1] != state.shape[-1]:
        return False
    rows = given.reshape(-1, given.shape[-1])
    known = state.reshape(-1, state.shape[-1]).to(given.dtype)
    return rows.shape[0] <= known.shape[0] and torch.equal(rows, known[known.shape[0] - rows.shape[0] :])


def arithmetic_candidates(config: Any) -> list[Arithmetic]:
    """List what the config's fields may mean for the logits, most usual reading first.

    `logits_scaling` divides in Granite and multiplies in HyperCLOVA-X; only the gate can tell.
    """

    def field(*names: str) -> float | None:
        values = (getattr(config, name, None) for name in names)
        return next((float(value) for value in values if value is not None), None)

    multiply = field("logit_scale", "lm_head_multiplier")
    scaling = field("logits_scaling")
    cap = field("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    if scaling is None:
        return [Arithmetic(multiply=multiply, softcap=cap)]
    return [
        Arithmetic(multiply=multiply, divide=scaling, softcap=cap),
        Arithmetic(multiply=scaling * (multiply or 1.0), softcap=cap),
    ]
