"""LensModel: a causal language model opened for reading: its states at sites, and its Unembed.

A LensModel exists only behind the gate: loading proves that the lens of the last state is the model's own logits.
Residual: a state, [rows, d_model]. Unembed: final norm, unembedding, bias, and the family's arithmetic.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from lenspipe.errors import ModelError
from lenspipe.grid import Site
from lenspipe.kernels import readout as kernel
from lenspipe.kernels.readout import Arithmetic, Head
from lenspipe.models.facts import ModelFacts
from lenspipe.models.gate import GateFigures, prove
from lenspipe.models.structure import (
    Structure,
    arithmetic_candidates,
    block_input,
    find_structure,
    first_tensor,
    probe_ids,
)
from lenspipe.recipe import Recipe


@dataclass(frozen=True)
class Unembed:
    """Final norm + unembedding + bias + arithmetic.

    Attributes:
        chain: the modules in front of the unembedding; they compute in the model's dtype.
        head: float32 operands.
        dtype: the model's.
    """

    chain: tuple[nn.Module, ...]
    head: Head
    dtype: torch.dtype

    def normed(self, residual_RD: Tensor) -> Tensor:
        """Apply final norm and projection, rounding as the model does: [R, D'] of the model's dtype."""
        state = residual_RD.to(self.head.weight_VD.device, self.dtype)[None]
        with torch.no_grad():
            for module in self.chain:
                state = module(state)
        return state[0]

    def logits(self, residual_RD: Tensor) -> Tensor:
        """Read states: float32 logits [R, V], equal to the model's own for the last state."""
        return kernel.logits(self.head, self.normed(residual_RD))


@dataclass(frozen=True)
class LensModel:
    """A loaded model behind the gate.

    Attributes:
        facts: what was known before loading.
        hf: the transformers model, in evaluation mode.
        structure: its parts.
        unembed: how its states are read.
        gate: the figures of the proof.
    """

    facts: ModelFacts
    hf: Any
    structure: Structure
    unembed: Unembed
    gate: GateFigures

    def states(self, ids_BS: Tensor, mask_BS: Tensor, sites: Sequence[Site]) -> dict[Site, Tensor]:
        """Run the blocks and read the residual stream.

        The pass ends at the last site asked for: later blocks, final norm and LM head do not run.

        Args:
            ids_BS: token ids, padded on the right.
            mask_BS: 1 where there is a token.
            sites: where to read.

        Returns:
            Per site, [B, S, D] in the model's dtype; rows under the padding mean nothing.
        """
        device = self.unembed.head.weight_VD.device
        return read_states(self.hf, self.structure.blocks, sites, ids_BS.to(device), mask_BS.to(device))


class _EnoughError(Exception):
    """Raised by a hook to end the forward pass once the last site has been read."""


def read_states(
    hf: Any, blocks: Sequence[nn.Module], sites: Sequence[Site], ids_BS: Tensor, mask_BS: Tensor
) -> dict[Site, Tensor]:
    """Run a model up to the deepest of the sites and return its states there."""
    found: dict[Site, Tensor] = {}
    with _hooks(blocks, sites, found), torch.no_grad(), suppress(_EnoughError):
        hf(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False)
    if missing := [site.name for site in sites if site not in found]:
        raise ModelError(f"{type(hf).__name__} ran without passing {', '.join(missing)}: it cannot be read there")
    return found


@contextmanager
def _hooks(blocks: Sequence[nn.Module], sites: Sequence[Site], found: dict[Site, Tensor]) -> Iterator[None]:
    deepest = max(sites, key=lambda site: site.layer)

    def keep(site: Site, state: Tensor | None) -> None:
        if state is None:
            raise ModelError(f"block {site.block} passes no tensor at {site.name}: it cannot be read there")
        found[site] = state
        if site == deepest:
            raise _EnoughError

    handles = []
    for site in sites:
        block = blocks[site.block]
        if site.kind == "resid_pre":

            def before(_m: Any, args: Any, kwargs: Any, site: Site = site) -> None:
                keep(site, block_input(args, kwargs))

            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        else:

            def after(_m: Any, _args: Any, output: Any, site: Site = site) -> None:
                keep(site, first_tensor(output))

            handles.append(block.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def open_model(hf: Any, facts: ModelFacts) -> LensModel:
    """Open a live transformers model, proving that its last state reads as its own logits.

    Raises:
        ModelError: it has no single residual stream that can be read.
        GateError: the proof failed.
    """
    hf.eval()
    weight: Any = hf.get_input_embeddings().weight
    structure = find_structure(hf, facts.n_blocks, weight.shape[0])
    unembedding: Any = structure.head
    bias = getattr(unembedding, "bias", None)
    head = Head(
        weight_VD=unembedding.weight.detach().float(),
        bias_V=None if bias is None else bias.detach().float(),
        arithmetic=Arithmetic(),
    )
    raw = Unembed(structure.chain, head, hf.dtype)
    last = Site("resid_post", facts.n_blocks - 1)
    ids = probe_ids(weight.shape[0]).to(weight.device)

    def last_state(probe: Tensor) -> Tensor:
        state = read_states(hf, structure.blocks, [last], probe, torch.ones_like(probe))[last]
        if state.dim() != 3 or state.shape[-1] != facts.d_model:
            raise ModelError(
                f"block outputs of {type(hf).__name__} have shape {tuple(state.shape)}, expected [batch, token, "
                f"{facts.d_model}]: there is no single residual stream to read"
            )
        return state[0]

    arithmetic, figures = prove(
        hf,
        structure.head,
        arithmetic_candidates(hf.config.get_text_config()),
        raw.logits,
        last_state,
        ids,
        tuple(type(module).__name__ for module in structure.chain),
    )
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % weight.shape[0]
    before, after = last_state(ids)[:-1], last_state(other)[:-1]
    if float((before - after).abs().max()) > figures.tolerance * float(before.abs().max()):
        raise ModelError(
            f"earlier positions of {type(hf).__name__} see later tokens: it is an encoder, or an encoder used as a "
            "decoder, and the logit lens reads causal language models"
        )
    unembed = replace(raw, head=replace(head, arithmetic=arithmetic))
    return LensModel(facts, hf, structure, unembed, figures)


def load_model(recipe: Recipe, facts: ModelFacts) -> LensModel:
    """Load a checkpoint and open it.

    Raises:
        ModelError: transformers cannot load it, or parts of it would be random.
        GateError: its last state does not read as its own logits.
    """
    import transformers  # noqa: PLC0415 -- takes seconds to import

    device = recipe.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = {} if recipe.model.attention == "auto" else {"attn_implementation": recipe.model.attention}
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            facts.folder,
            dtype=facts.dtype,
            trust_remote_code=recipe.model.trust_remote_code,
            output_loading_info=True,
            **attention,
        )
        hf, report = loaded[0].to(device), loaded[1]
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"cannot load model {facts.name} from {facts.folder}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model {facts.name}: the checkpoint lacks {', '.join(missing[:3])}{' ...' if missing[3:] else ''} "
            f"({len(missing)} in all), which would be made up at random: name a complete checkpoint"
        )
    return open_model(hf, facts)


_shared: dict[tuple[str, ...], LensModel | ModelError] = {}
_lock = Lock()


def shared_model(recipe: Recipe, facts: ModelFacts) -> LensModel:
    """Load a model once per process, and keep the one last used; a model that was refused once stays refused.

    Raises:
        ModelError: as load_model.
    """
    name = (str(facts.folder), facts.digest, facts.dtype, recipe.model.attention, recipe.run.device)
    with _lock:
        if name not in _shared:
            _shared.clear()
            try:
                _shared[name] = load_model(recipe, facts)
            except ModelError as error:
                _shared[name] = error
        found = _shared[name]
    if isinstance(found, ModelError):
        raise found
    return found
