"""Run: a recipe carried out: planned first, and handed to Prefect only if something is left to do."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from lenspipe.errors import DamagedArtifactError, RequestError, UnconvertedError
from lenspipe.models.gguf import convert
from lenspipe.plan import Plan, make_plan, require_room
from lenspipe.recipe import Recipe

ATTEMPTS = 3
"""How often a run goes back for an artifact that turned out damaged on the way."""

_QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_LEVEL": "CRITICAL",
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
        plan = plan_recipe(recipe, say)
        for name in plan.damaged:
            say(f"artifact {name} is damaged and will be redone")
        on_plan(plan)
        if plan.is_done:
            return plan.dataset_path
        require_room(plan)
        _private_prefect(recipe)
        from lenspipe import pipeline  # noqa: PLC0415 -- imports Prefect, whose settings are read then, and torch

        pipeline.listener = on_work
        try:
            return pipeline.run_flow(recipe)
        except DamagedArtifactError as error:
            if attempt + 1 == ATTEMPTS:
                raise
            say(str(error))
        finally:
            pipeline.listener = None
    raise AssertionError("unreachable")


def _private_prefect(recipe: Recipe) -> None:
    """Keep the user's own Prefect out of it, unless a server is named in the recipe or in PREFECT_API_URL."""
    if recipe.run.api:
        os.environ["PREFECT_API_URL"] = recipe.run.api
    elif "PREFECT_API_URL" not in os.environ and "prefect" not in sys.modules:
        os.environ["PREFECT_HOME"] = str(recipe.store / "prefect")
    if recipe.run.api and "prefect" in sys.modules:
        raise RequestError("run.api is read when Prefect is first imported: set PREFECT_API_URL before that instead")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
