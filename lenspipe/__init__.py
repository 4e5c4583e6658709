"""lenspipe: the logit lens at corpus scale.

A recipe names a model, a corpus, states and measures; `run` does what is missing and returns the path of one labelled
dataset; `open_dataset` opens it. In memory, `logit_lens` reads a few texts and `readout` any vectors of a `LensModel`.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenspipe.analysis import open_dataset
    from lenspipe.models.lens_model import LensModel
    from lenspipe.prompts import logit_lens
    from lenspipe.readouts import Readout
    from lenspipe.recipe import Recipe, load_recipe, make_recipe
    from lenspipe.runs import plan_recipe, run
    from lenspipe.validation import validate_lens
    from lenspipe.vectors import readout

__version__ = version("lenspipe")
_HOME = {
    "LensModel": "models.lens_model",
    "Readout": "readouts",
    "Recipe": "recipe",
    "load_recipe": "recipe",
    "logit_lens": "prompts",
    "make_recipe": "recipe",
    "open_dataset": "analysis",
    "plan_recipe": "runs",
    "readout": "vectors",
    "run": "runs",
    "validate_lens": "validation",
}
__all__ = [
    "LensModel",
    "Readout",
    "Recipe",
    "load_recipe",
    "logit_lens",
    "make_recipe",
    "open_dataset",
    "plan_recipe",
    "readout",
    "run",
    "validate_lens",
]


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that the command line starts at once."""
    if name not in _HOME:
        raise AttributeError(f"module 'lenspipe' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 -- only when something is asked for

    return getattr(import_module(f"lenspipe.{_HOME[name]}"), name)
