"""lenspipe: the logit lens at corpus scale.

A recipe names a model, a corpus, states and measures; `run` does what is missing and returns the path of one labelled
dataset; `open_dataset` opens it.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenspipe.analysis import open_dataset
    from lenspipe.readouts import Readout
    from lenspipe.recipe import Recipe, load_recipe, make_recipe
    from lenspipe.runs import plan_recipe, run
    from lenspipe.vectors import readout

__version__ = version("lenspipe")
__all__ = ["Readout", "Recipe", "load_recipe", "make_recipe", "open_dataset", "plan_recipe", "readout", "run"]

_HOME = {
    "Readout": "readouts",
    "Recipe": "recipe",
    "load_recipe": "recipe",
    "make_recipe": "recipe",
    "open_dataset": "analysis",
    "plan_recipe": "runs",
    "readout": "vectors",
    "run": "runs",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that the command line starts at once."""
    if name not in _HOME:
        raise AttributeError(f"module 'lenspipe' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 -- only when something is asked for

    return getattr(import_module(f"lenspipe.{_HOME[name]}"), name)
