"""The sweep: every causal language model type of the installed transformers, read by lenspipe and checked without it.

`python -m tests.families.sweep` (or `make families`) prints one line a type and writes docs/families.md. A type is
exact if the gate passes it and, at every layer, our logits are those of the model itself with its later blocks
switched off, which is computed here with hooks of our own, and a padded row reads as it does alone.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lenspipe.errors import LenspipeError
from lenspipe.grid import Site
from lenspipe.models.facts import sizes_of
from lenspipe.models.lens_model import LensModel, open_model
from tests.families.tiny import TYPES, NotBuildable, build

PAGE = Path(__file__).parents[2] / "docs/families.md"
IDS = torch.tensor([[5, 17, 33, 88, 41, 9, 60, 12, 77, 30, 21, 64, 3, 52, 90, 46]])
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Verdict:
    """What became of one type: exact, refused, not buildable, or wrong."""

    model_type: str
    result: str
    reason: str = ""
    chain: str = ""
    arithmetic: str = ""
    inside: str = ""


def judge(model_type: str) -> Verdict:
    """Build one type, open it, and check what is read."""
    try:
        model = build(model_type)
    except NotBuildable as error:
        return Verdict(model_type, "not buildable", str(error))
    try:
        opened = open_model(model)
    except LenspipeError as error:
        return Verdict(model_type, "refused", str(error))
    facts = opened.facts
    if sizes_of(model.config.to_dict(), model_type) != (facts.n_blocks, facts.d_model, facts.vocab_size):
        return Verdict(model_type, "wrong", "its config.json does not tell its sizes")
    if worst := disagreement(model, opened):
        return Verdict(model_type, "wrong", worst)
    parts = [("middle", "resid_mid"), ("attention", "attn_out"), ("mlp", "mlp_out")]
    counts = {name: sum(getattr(block, part) is not None for block in opened.branches) for part, name in parts}
    n = len(opened.branches)
    inside = ", ".join(name if count == n else f"{name} ({count} of {n})" for name, count in counts.items() if count)
    chain = " → ".join(opened.gate.chain)
    reason = "" if opened.gate.pads else "only sequences of one length share a batch, since padding changes numbers"
    return Verdict(model_type, "exact", reason, chain, opened.gate.arithmetic, inside)


def disagreement(model: Any, opened: LensModel) -> str:
    """Compare every layer's logits with the model cut off there; says where they differ, or nothing."""
    n_blocks = opened.facts.n_blocks
    blocks = blocks_of(model, n_blocks)
    for depth in range(1, n_blocks + 1):
        site = Site("resid_post", depth - 1)
        ours = opened.unembed.logits(opened.states(IDS, torch.ones_like(IDS), [site])[site])[0]
        theirs = cut_off(model, blocks, depth)
        if not torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE * float(theirs.abs().max())):
            return f"layer {depth} differs by {float((ours - theirs).abs().max()):.2g}"
    site = Site("resid_post", n_blocks - 1)
    both = torch.cat([IDS, IDS.flip(1)])
    mask = torch.ones_like(both)
    both[1, 8:], mask[1, 8:] = 0, 0
    padded = opened.states(both, mask, [site])[site][1, :8]
    alone = opened.states(both[1:, :8], mask[1:, :8], [site])[site][0]
    if not torch.allclose(padded, alone, rtol=0, atol=1e-4 * float(alone.abs().max())):
        return f"a padded row differs by {float((padded - alone).abs().max()):.2g}"
    return ""


def blocks_of(model: nn.Module, n_blocks: int) -> list[nn.Module]:
    """The outermost list of blocks that a text runs through, found anew."""
    ran: set[int] = set()
    handles = [m.register_forward_hook(lambda module, *_: ran.add(id(module))) for m in model.modules()]
    with torch.no_grad():
        model(IDS, use_cache=False)
    for handle in handles:
        handle.remove()
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == n_blocks]
    return next(list(group) for group in lists if all(id(block) in ran for block in group))


def cut_off(model: Any, blocks: list[nn.Module], depth: int) -> Tensor:
    """The model's own logits [S, V] when blocks from `depth` on hand their input through."""

    def pass_on(_module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        state = args[0] if args else kwargs["hidden_states"]
        return (state, *output[1:]) if isinstance(output, tuple | list) else state

    handles = [block.register_forward_hook(pass_on, with_kwargs=True) for block in blocks[depth:]]
    with torch.no_grad():
        logits: Tensor = model(IDS, use_cache=False).logits[0].float()
    for handle in handles:
        handle.remove()
    return logits


def page(verdicts: list[Verdict]) -> str:
    """Lay the verdicts out as docs/families.md."""
    counts = Counter(verdict.result for verdict in verdicts)
    lines = [
        "# Model families",
        "",
        f"Every causal language model type of transformers {version('transformers')}, built tiny with random weights, "
        "norms, biases, caps and scales, and read in float32. Written by `make families`; the tests hold every type "
        "that is exact here to staying so.",
        "",
        f"**{counts['exact']} exact, {counts['refused']} refused, {counts['not buildable']} not buildable, "
        f"{counts['wrong']} wrong.**",
        "",
        "- *exact*: the gate passes, and at every layer our logits are those of the model itself with its later blocks "
        "switched off.",
        "- *refused*: lenspipe says why and reads nothing. `[model.parts]` in the recipe names parts that it does not "
        "find; the gate still decides.",
        "- *not buildable*: the type cannot be built from a config alone.",
        "",
        "| type | result | from the last block to the logits | sites inside blocks | remark |",
        "|---|---|---|---|---|",
    ]
    for v in verdicts:
        way = " → ".join([*filter(None, [v.chain]), "unembedding", *([v.arithmetic] * (v.arithmetic != "none"))])
        lines.append(
            f"| `{v.model_type}` | {v.result} | {way if v.result == 'exact' else ''} | {v.inside} | {v.reason} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Judge all types, or those named."""
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    verdicts = []
    for model_type in sys.argv[1:] or TYPES:
        verdicts.append(judge(model_type))
        v = verdicts[-1]
        print(f"{v.model_type:28} {v.result:14} {v.chain} {v.arithmetic} {v.reason}", flush=True)
    print(dict(Counter(verdict.result for verdict in verdicts)))
    if not sys.argv[1:]:
        PAGE.write_text(page(verdicts), encoding="utf-8")


if __name__ == "__main__":
    main()
