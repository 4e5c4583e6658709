"""Frame: what all commands share: their commands' common arguments, messages and exit statuses.

Results go to standard output, everything said on the way to standard error. Exit status 0: done; 1: the run failed;
2: the request was wrong. Heavy libraries are imported by the command that needs them.
"""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lenspipe.errors import LenspipeError, ModelError, RequestError

app = typer.Typer(
    help="The logit lens at corpus scale: from text to one labelled xarray dataset.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a TOML file.", metavar="RECIPE")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting, such as read.top_k=20; may be repeated.")
]
DatasetPath = Annotated[str, typer.Argument(help="The dataset, as printed by `lenspipe run`.", metavar="DATASET")]
Where = Annotated[str, typer.Argument(help="A store's folder or URL, or a recipe, whose store it is.", metavar="WHERE")]


def main() -> None:
    """Run the command line, turning errors into messages and exit statuses."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's way to press Ctrl-C
    try:
        app()
    except LenspipeError as error:
        say(f"error: {error}")
        sys.exit(2 if isinstance(error, RequestError | ModelError) else 1)
    except BrokenPipeError:
        sys.exit(1)


def say(line: str) -> None:
    """Tell the person at the terminal something that is no result."""
    print(line, file=sys.stderr)


def store_of(where: str) -> Any:
    """Open the store that a command is about.

    Raises:
        RequestError: neither a store nor a recipe.
    """
    from lenspipe.folders import copy_of, is_url  # noqa: PLC0415
    from lenspipe.recipe import load_recipe  # noqa: PLC0415
    from lenspipe.storage.artifacts import ArtifactStore  # noqa: PLC0415

    if is_url(where):
        return ArtifactStore(copy_of(where))
    root = Path(where) if Path(where).is_dir() else load_recipe(where).store
    store = ArtifactStore(root.absolute())
    if not store.remote and not root.is_dir():
        raise RequestError(f"there is no store at {root} yet: `lenspipe run` makes it")
    if Path(where).is_dir() and not any((root / name).is_dir() for name in ("encode", "runs")):
        raise RequestError(f"{where} is no store of lenspipe: give the folder that run.store names, or a recipe")
    return store
