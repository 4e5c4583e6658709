"""Run: a recipe carried out: planned first, and handed to Prefect if something is left to do, or a server is named.

Whoever names a Prefect server, in the recipe or in PREFECT_API_URL, finds every run recorded there, cached or not.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from lenspipe.errors import DamagedArtifactError, RequestError, UnconvertedError
from lenspipe.folders import cache_folder
from lenspipe.history import record_if_unknown
from lenspipe.models.gguf import convert
from lenspipe.plan import Plan, make_plan, require_room
from lenspipe.recipe import Recipe
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.storage.owners import sweep

ATTEMPTS = 3
"""How often a run goes back for an artifact that turned out damaged on the way."""

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # a server that is stopped mid-query would say so at length
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def plan_recipe(recipe: Recipe, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Plan a recipe, converting a GGUF model first if that was never done.

    Raises:
        RequestError, ModelError: as make_plan.
    """
    try:
        return make_plan(recipe)
    except UnconvertedError:
        convert(recipe.path(recipe.model.source), say)
        return make_plan(recipe)


def run(
    recipe: Recipe,
    say: Callable[[str], None] = lambda _: None,
    on_plan: Callable[[Plan], None] = lambda _: None,
    on_work: Callable[[str, int], None] | None = None,
) -> Path:
    """Carry a recipe out and return the dataset's path; what exists already is not done again.

    Args:
        recipe: what to do.
        say: told one line at a time what a person should know.
        on_plan: told the plan, and each new plan if damage is found on the way.
        on_work: told (stage, tokens) as work is done in this process.

    Raises:
        LenspipeError: it cannot be done; everything finished before is safe.
    """
    for attempt in range(ATTEMPTS):
        try:
            plan = plan_recipe(recipe, say)
        except DamagedArtifactError as error:
            say(str(error))
            plan = plan_recipe(recipe, say)
        for name in plan.damaged:
            say(f"artifact {name} is damaged and will be redone")
        on_plan(plan)
        if not plan.is_done:
            require_room(plan)
            ArtifactStore(recipe.store).require_writable()
            sweep(recipe.store)
        else:
            record_if_unknown(plan)
        if plan.is_done and not _server(recipe):
            return _at_hand(plan, say)
        if plan.is_done:
            say("recording a run with nothing to do on the Prefect server")
        _set_up_prefect(recipe)
        from lenspipe import pipeline  # noqa: PLC0415 -- imports Prefect, whose settings are read then, and torch

        pipeline.listener = on_work
        try:
            pipeline.run_flow(plan)
            return _at_hand(plan, say)
        except DamagedArtifactError as error:
            if attempt + 1 == ATTEMPTS:
                raise
            say(f"{error}; checking every byte of what else the run needs")
            _check(plan, say)
        finally:
            pipeline.listener = None
    raise AssertionError("unreachable")


def _at_hand(plan: Plan, say: Callable[[str], None]) -> Path:
    """Find the dataset's path, fetching it if the store is at a URL."""
    store = ArtifactStore(plan.recipe.store)
    store.open("assemble", plan.dataset)
    if store.remote:
        say(f"the dataset is at {store.address('assemble', plan.dataset)}/{plan.dataset_path.name}, and here:")
    return plan.dataset_path


def _check(plan: Plan, say: Callable[[str], None]) -> None:
    """Set aside whatever a plan needs that is not what was written: damage seldom comes alone."""
    store = ArtifactStore(plan.recipe.store)
    for name in plan.artifacts():
        for _ in range(2):  # in the folder, and behind it
            if store.is_damaged(*name, deep=True):
                say(str(store.set_aside(*name)))


def _server(recipe: Recipe) -> str | None:
    """Find the URL of the Prefect server that the recipe or the environment names."""
    return recipe.run.api or os.environ.get("PREFECT_API_URL")


def _set_up_prefect(recipe: Recipe) -> None:
    """Lead Prefect to the server that is named, or else keep the user's own Prefect out of it."""
    imported, named = "prefect" in sys.modules, os.environ.get("PREFECT_API_URL")
    if imported and recipe.run.api not in (None, named):
        raise RequestError("run.api is read when Prefect is first imported: set PREFECT_API_URL before that instead")
    if server := _server(recipe):
        os.environ["PREFECT_API_URL"] = server
    elif not imported:
        # Not in the store: its disk may be full, a share across a network, or in use by another run's server.
        os.environ["PREFECT_HOME"] = str(cache_folder() / "prefect")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
