"""Write the generated pages of docs/, or with --check prove that they and the README are true today.

docs/variables.md comes from lenspipe/variables.py, docs/recipe.md from lenspipe/recipe.py. The check runs every python
block of the README and of docs/coming-from.md, in order, in one namespace a page, and every call in that page's tables.
"""

import re
import sys
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lenspipe.recipe import Recipe
from lenspipe.variables import COORDINATES, VARIABLES, Variable

ROOT = Path(__file__).parents[1]
NOTE = "<!-- written by scripts/docs.py; `make docs` checks it, `python scripts/docs.py` rewrites it -->"


def variables_page() -> str:
    """Describe every variable of the dataset."""

    def table(chosen: tuple[Variable, ...]) -> list[str]:
        rows = ["| variable | dims | type | unit | meaning | definition | measure |", "|---|---|---|---|---|---|---|"]
        for v in chosen:
            cells = [f"`{v.name}`", ", ".join(v.dims), v.dtype, v.units, v.long_name, v.definition, v.measure or ""]
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        return rows

    lines = ["# Variables of the dataset", "", NOTE, "", "Logarithms are natural; ranks count from 0.", ""]
    lines += ["## Readouts", "", *table(VARIABLES), "", "## Coordinates and tables", "", *table(COORDINATES), ""]
    return "\n".join(lines)


def recipe_page() -> str:
    """Describe every name of a recipe."""
    lines = [
        "# Recipes",
        "",
        NOTE,
        "",
        "Paths are relative to the recipe's folder. `--set group.name=value` changes one.",
        "",
    ]
    for group, field in Recipe.model_fields.items():
        if group != "base":
            lines += group_section(group, field.annotation)
    return "\n".join(lines)


def group_section(name: str, model: Any) -> list[str]:
    """Describe a group, and the tables inside it after it."""
    summary = (model.__doc__ or "").split(": ", 1)[-1]
    lines = [f"## [{name}]", "", summary[:1].upper() + summary[1:], ""]
    lines += ["| name | type | default | meaning |", "|---|---|---|---|"]
    inner = []
    for field, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            inner += group_section(f"{name}.{field}", info.annotation)
            continue
        kind = spell(info.annotation).replace("|", "\\|")
        lines.append(f"| `{field}` | {kind} | {default(info)} | {info.description} |")
    return [*lines, "", *inner]


def default(info: FieldInfo) -> str:
    """Spell a default as TOML would."""
    if info.is_required():
        return "required"
    if info.default is None:
        return ""
    return f"`{str(info.default).lower() if isinstance(info.default, bool) else repr(info.default)}`"


def spell(kind: object) -> str:
    """Spell a type for people."""
    if get_origin(kind) is Annotated:
        return spell(get_args(kind)[0])
    if isinstance(kind, UnionType) or str(get_origin(kind)) == "typing.Union":
        return " | ".join(spell(part) for part in get_args(kind) if part is not type(None))
    if str(get_origin(kind)) == "typing.Literal":
        return " | ".join(f'"{value}"' for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {spell(get_args(kind)[0])}"
    return getattr(kind, "__name__", str(kind))


def main() -> None:
    """Write or check."""
    pages = {"variables.md": variables_page(), "recipe.md": recipe_page()}
    if "--check" not in sys.argv[1:]:
        for name, text in pages.items():
            (ROOT / "docs" / name).write_text(text, encoding="utf-8")
        return
    for name, text in pages.items():
        if (ROOT / "docs" / name).read_text(encoding="utf-8") != text:
            sys.exit(f"docs/{name} is not what the code says: run python scripts/docs.py")
    counts = [run_examples(ROOT / name) for name in ("README.md", "docs/coming-from.md")]
    print(f"docs: {len(pages)} generated pages and {sum(counts)} examples are true")


def run_examples(path: Path) -> int:
    """Run a page's python blocks and the last cells of its tables, and count them."""
    namespace: dict[str, object] = {}
    pattern = r"^```python\n([\s\S]*?)^```|^\|.*\| `([^`|]+)` \|$"
    found = re.findall(pattern, path.read_text(encoding="utf-8"), re.M)
    for block, call in found:
        exec(compile(block or call, path.name, "exec"), namespace)
    return len(found)


if __name__ == "__main__":
    main()
