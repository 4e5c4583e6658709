"""LensModel: a causal language model opened for reading: its states at sites, and its Unembed.

A LensModel exists only behind the gate: opening proves that the lens of the last state is the model's own logits.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lenspipe.errors import LenspipeError, ModelError, RequestError
from lenspipe.grid import Site, select_sites
from lenspipe.kernels.head import Arithmetic, Head
from lenspipe.models.arithmetic import arithmetic_candidates
from lenspipe.models.branches import BRANCHED, Branches, find_branches
from lenspipe.models.facts import WIDTH, ModelFacts, declared, live_facts, read_facts
from lenspipe.models.gate import GateFigures, prove
from lenspipe.models.gguf import convert
from lenspipe.models.reading import read_states, require_sites
from lenspipe.models.structure import Structure, find_structure, probe_ids, require_unembedding, run
from lenspipe.models.tokenizer import Tokenizer, load_tokenizer
from lenspipe.models.unembed import Unembed
from lenspipe.recipe import Parts, Recipe, make_recipe


@dataclass(frozen=True)
class LensModel:
    """A loaded model behind the gate.

    Attributes:
        facts: name, depth, widths.
        hf: the transformers model, in evaluation mode.
        structure: its parts.
        unembed: how its states are read.
        gate: the figures of the proof.
        tokenizer: its own, or None for a live model that came without one.
    """

    facts: ModelFacts
    hf: Any
    structure: Structure
    unembed: Unembed
    gate: GateFigures
    tokenizer: Tokenizer | None = None
    _one_pass: Any = field(default_factory=Lock, repr=False)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        attention: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
    ) -> "LensModel":
        """Load a checkpoint with its tokenizer, behind the gate.

        Args:
            source: a local folder, a GGUF file or a hub id.
            revision: the hub's branch, tag or commit.
            dtype: what the model computes in: auto, float32, bfloat16, float16.
            attention: attention implementation.
            device: cpu, cuda ...
            trust_remote_code: run Python code that comes with the checkpoint.

        Raises:
            RequestError: no such model.
            ModelError: it cannot be read; GateError where it would be read wrongly.
        """
        asked = {"source": str(source), "dtype": dtype, "attention": attention, "trust_remote_code": trust_remote_code}
        named = asked | ({"revision": revision} if revision else {})
        values = {"model": named, "corpus": {"source": "none"}, "run": {"device": device}}
        recipe = make_recipe(values, origin="LensModel.load")
        if str(source).endswith(".gguf"):
            convert(recipe.path(str(source)))
        facts = read_facts(recipe)
        return load_model(recipe, facts, load_tokenizer(facts.folder, trust_remote_code))

    @classmethod
    def of(cls, hf: Any, tokenizer: Any = None) -> "LensModel":
        """Open a live transformers model in evaluation mode, and leave it as it is.

        Args:
            hf: the model.
            tokenizer: its transformers tokenizer; without one, token ids take the place of texts.

        Raises:
            RequestError: no transformers model, or one in training mode.
            ModelError: it cannot be read; GateError where it would be read wrongly.
        """
        return open_model(hf, tokenizer=None if tokenizer is None else Tokenizer(tokenizer))

    @cached_property
    def branches(self) -> tuple[Branches, ...]:
        """What is known of the inside of every block, for resid_mid, attn_out and mlp_out."""
        with self._one_pass:
            return find_branches(self.hf, self.structure, probe_ids(self.hf))

    @property
    def device(self) -> torch.device:
        """Where the unembedding is."""
        return self.unembed.head.weight_VD.device

    def require(self, sites: Sequence[Site]) -> None:
        """Make sure that the model has the sites.

        Raises:
            ModelError: it has not, saying why.
        """
        if any(site.kind in BRANCHED for site in sites):
            require_sites(self.branches, sites)

    def states(self, ids_BS: Tensor, mask_BS: Tensor, sites: Sequence[Site]) -> dict[Site, Tensor]:
        """Run the blocks and read the residual stream.

        The pass ends at the last site asked for: later blocks, final norm and LM head do not run.

        Args:
            ids_BS: token ids, padded on the right.
            mask_BS: 1 where there is a token.
            sites: where to read.

        Returns:
            Per site, [B, S, D] in the model's dtype; rows under the padding mean nothing.

        Raises:
            ModelError: a site that this model does not have.
        """
        self.require(sites)
        ids_BS, mask_BS = ids_BS.to(self.device), mask_BS.to(self.device)
        if self.gate.pads or ids_BS.shape[0] == 1:
            return self._read(ids_BS, mask_BS, sites)
        found: dict[Site, Tensor] = {}
        lengths_B = mask_BS.sum(dim=1)
        for length in sorted(set(lengths_B.tolist())):  # only sequences of one length share a batch
            rows_B = lengths_B == length
            for site, state in self._read(ids_BS[rows_B, :length], mask_BS[rows_B, :length], sites).items():
                if site not in found:
                    found[site] = state.new_zeros(*ids_BS.shape, state.shape[-1])
                found[site][rows_B, :length] = state
        return found

    def _read(self, ids_BS: Tensor, mask_BS: Tensor, sites: Sequence[Site]) -> dict[Site, Tensor]:
        branches = self.branches if any(site.kind in BRANCHED for site in sites) else ()
        with self._one_pass:  # hooks of one thread would see the passes of another
            return read_states(self.hf, self.structure, branches, sites, ids_BS, mask_BS)

    def capture(self, tokens: Tensor | Sequence[int], sites: str | Sequence[str]) -> dict[str, Tensor]:
        """Capture one sequence's states.

        Args:
            tokens: ids, [S] or [1, S], as `to_tokens` gives them.
            sites: site names, or kinds that stand for all blocks.

        Returns:
            Per site name, [S, d_model] in the model's dtype.

        Raises:
            RequestError: no tokens, ids out of range, an unknown site.
            ModelError: a site that this model does not have.
        """
        ids = self.check_ids(tokens)[None]
        names = [sites] if isinstance(sites, str) else list(sites)
        if not names or not all(isinstance(name, str) for name in names):
            raise RequestError(f"sites must be names such as resid_post.3, one at least; found {names!r}")
        chosen = select_sites(names, None, self.facts.n_blocks)
        found = self.states(ids, torch.ones_like(ids), chosen)
        return {site.name: state[0] for site, state in found.items()}

    def check_ids(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Hold token ids against the vocabulary: int64 [S].

        Raises:
            RequestError: strings, no tokens, another shape, ids out of range, or more than the model has positions.
        """
        if isinstance(tokens, str):
            raise RequestError(f"{tokens[:40]!r} is a text where token ids belong: use to_tokens first")
        try:
            ids = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"token ids must be one sequence of integers; {str(tokens)[:40]!r}: {error}") from None
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.dim() != 1 or not ids.numel():
            raise RequestError(f"token ids must be one sequence of at least one id; found shape {tuple(ids.shape)}")
        if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
            raise RequestError(f"token ids must be integers; found {ids.dtype}")
        self.require_ids(ids)
        most = self.facts.max_positions
        if most and len(ids) > most:
            raise RequestError(f"{len(ids)} tokens, and {self.facts.name} has {most} positions: shorten the text")
        return ids.long()

    def require_ids(self, ids: Tensor) -> None:
        """Make sure that the model has these token ids: any integers.

        Raises:
            RequestError: names one that it has not.
        """
        wrong = ids[(ids < 0) | (ids >= self.n_inputs)]
        if len(wrong):
            raise RequestError(f"token id {int(wrong[0])}: this model has ids 0 to {self.n_inputs - 1}")

    @property
    def n_inputs(self) -> int:
        """Number of token ids that the model takes."""
        return int(self.hf.get_input_embeddings().weight.shape[0])

    def to_tokens(self, text: str, bos: str = "auto") -> Tensor:
        """Tokenize a text as a corpus run would: int64 [S].

        Args:
            text: anything but nothing.
            bos: auto (as the tokenizer does), always, or never.

        Raises:
            RequestError: no tokens, a doubled BOS, or no tokenizer.
        """
        return torch.tensor(self.require_tokenizer().encode(text, bos, "the text")[0])

    def to_string(self, tokens: Tensor | Sequence[int] | int) -> str:
        """Spell token ids as text.

        Raises:
            RequestError: no tokenizer.
        """
        ids = torch.as_tensor(tokens).reshape(-1).tolist()
        return str(self.require_tokenizer().hf.decode(ids, clean_up_tokenization_spaces=False))

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            RequestError: there is none.
        """
        if self.tokenizer is None:
            raise RequestError("this model came without a tokenizer: pass tokenizer=, or token ids")
        return self.tokenizer


def open_model(
    hf: Any, facts: ModelFacts | None = None, parts: Parts | None = None, tokenizer: Tokenizer | None = None
) -> LensModel:
    """Open a live transformers model, proving that its last state reads as its own logits.

    Args:
        hf: the model; left as it is, so it must be in evaluation mode.
        facts: what is known of its checkpoint; by default what the model itself says.
        parts: parts that the user names.
        tokenizer: its own.

    Raises:
        RequestError: it is in training mode, or has no part of a name given.
        ModelError: it has no single residual stream that can be read.
        GateError: the proof failed.
    """
    name = type(hf).__name__
    parts = parts or Parts()
    if not (isinstance(hf, torch.nn.Module) and hasattr(hf, "config")):
        raise RequestError(f"a transformers model is needed, found {name}; LensModel.load opens one by its name")
    if any(module.training for module in hf.modules()):
        raise RequestError(f"{name} is in training mode, in which dropout changes every number: call model.eval()")
    if getattr(hf.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder: the logit lens reads decoder-only language models")
    require_unembedding(hf, parts)
    ids = probe_ids(hf)
    try:
        n_logits = run(hf, ids).logits.shape[-1]
    except Exception as error:  # models raise what they like
        raise ModelError(f"{name} does not run on a text alone: {type(error).__name__}: {error}") from error
    structure = find_structure(hf, parts, ids, facts.n_blocks if facts else None)
    config: Any = hf.config
    text = config.get_text_config(decoder=True)
    said = declared(text, WIDTH)
    if said not in (None, structure.d_model):
        raise ModelError(
            f"the blocks of {name} pass states of width {structure.d_model}, and its config says {said}: they hold "
            "several residual streams, and there is no single one to read"
        )
    # Logits may be fewer than the rows of a padded unembedding.
    weight, bias = structure.head.weight.detach()[:n_logits].contiguous(), getattr(structure.head, "bias", None)
    head = Head(weight, None if bias is None else bias.detach().float()[:n_logits], Arithmetic())
    raw = Unembed(structure.chain, head, structure.dtype, structure.d_model)
    candidates = arithmetic_candidates(text, parts)
    try:
        arithmetic, figures = prove(hf, structure, raw, candidates, ids, measure=not parts.names_arithmetic)
    except LenspipeError:
        raise
    except Exception as error:  # modules raise what they like when they are run in another's place
        chain = " -> ".join([*(type(m).__name__ for m in structure.chain), type(structure.head).__name__])
        raise ModelError(f"{name} cannot be read through {chain}: {type(error).__name__}: {error}") from error
    unembed = replace(raw, head=replace(head, arithmetic=arithmetic))
    facts = facts or live_facts(hf, len(structure.blocks), structure.d_model, head.vocab_size)
    if (facts.d_model, facts.vocab_size) != (structure.d_model, head.vocab_size):
        raise ModelError(
            f"{name} has width {structure.d_model} and {head.vocab_size} logits, and its config says {facts.d_model} "
            f"and {facts.vocab_size}: the checkpoint does not fit its config"
        )
    return LensModel(facts, hf, structure, unembed, figures, tokenizer)


def load_model(recipe: Recipe, facts: ModelFacts, tokenizer: Tokenizer | None = None) -> LensModel:
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
        hf, report = loaded[0].to(device).eval(), loaded[1]
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"cannot load model {facts.name} from {facts.folder}: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model {facts.name}: the checkpoint lacks {', '.join(missing[:3])}{' ...' if missing[3:] else ''} "
            f"({len(missing)} in all), which would be made up at random: name a complete checkpoint"
        )
    return open_model(hf, facts, recipe.model.parts, tokenizer)
