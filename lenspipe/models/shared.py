"""Shared model: the one model that a process has loaded, kept from task to task."""

from threading import Lock

from lenspipe.errors import ModelError
from lenspipe.models.facts import ModelFacts
from lenspipe.models.lens_model import LensModel, load_model
from lenspipe.recipe import Recipe

_shared: dict[str, LensModel | ModelError] = {}
_lock = Lock()


def shared_model(recipe: Recipe, facts: ModelFacts) -> LensModel:
    """Load a model once per process, and keep the one last used; a model that was refused once stays refused.

    Raises:
        ModelError: as load_model.
    """
    name = repr((facts.folder, facts.digest, facts.dtype, recipe.model, recipe.run.device))
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
