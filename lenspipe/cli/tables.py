"""Tables: how the command line prints what has columns."""

from typing import Any


def table(*columns: tuple[str, Any]) -> Any:
    """Begin a table of columns (name, justification)."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for name, justify in columns:
        made.add_column(name, justify=justify, no_wrap=True)
    return made


def show(made: Any, stderr: bool = False) -> None:
    """Print a table; where that is no terminal, wide enough for all its columns."""
    from rich.console import Console  # noqa: PLC0415

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=max(console.width, 160))
    console.print(made)


def print_frame(frame: Any, formats: dict[str, str]) -> None:
    """Print a data frame by layer; `formats` spells the numbers of a column."""
    from rich.text import Text  # noqa: PLC0415

    def spell(value: Any, name: object) -> str:
        if not isinstance(value, float):
            return str(value)
        return "—" if value != value else format(value, formats.get(str(name), ".3f"))

    made = table(("layer", "right"), *((str(name), "left" if name == "site" else "right") for name in frame.columns))
    for layer, row in frame.iterrows():
        made.add_row(f"{layer:g}", *(Text(spell(value, name)) for name, value in row.items()))
    show(made)


def lenses_of(ds: Any) -> list[Any]:
    """Take a dataset apart by lens, if it has several."""
    return [ds.sel(lens=name) for name in ds["lens"].values] if "lens" in ds.dims else [ds]


def size(n: int) -> str:
    """Spell bytes: 512 B, 3.4 MiB."""
    amount, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:,.0f} {units[0]}" if units[0] == "B" else f"{amount:,.1f} {units[0]}"


def span(seconds: float) -> str:
    """Spell a time: 42 s, 3 min, 2.5 h, 4 d."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            amount = seconds / length
            return f"{amount:.1f} {unit}" if amount < 10 and unit != "min" else f"{amount:.0f} {unit}"
    return f"{seconds:.0f} s"
