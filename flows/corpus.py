"""Corpus flow: the deployable entry point: one recipe, carried out on a schedule by any Prefect worker."""

from collections.abc import Sequence

from prefect import flow

from lenspipe.pipeline import run_flow
from lenspipe.recipe import load_recipe
from lenspipe.runs import plan_recipe


@flow(name="lenspipe-corpus", persist_result=False)
def corpus(recipe: str, settings: Sequence[str] = ()) -> str:
    """Do what a recipe asks for and is not there yet.

    Args:
        recipe: path of the TOML file, seen from the deployment's folder.
        settings: changes such as "read.top_k=20".

    Returns:
        The dataset's path.
    """
    plan = plan_recipe(load_recipe(recipe, settings), print)
    return str(plan.dataset_path if plan.is_done else run_flow(plan))
