"""Damage: a finished store spoiled at a random place in a random way, and run again.

`python -m tests.chaos.damage --rounds 1000` spoils many and prints what became of them; `make chaos` calls it.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lenspipe.errors import LenspipeError
from lenspipe.plan import make_plan
from lenspipe.storage.artifacts import ArtifactStore
from lenspipe.upkeep import ALL_STAGES
from tests.chaos.small import carry_out, contents, small_recipe

Choose = random.Random


def flip_a_bit(path: Path, choose: Choose) -> None:
    content = bytearray(path.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


def replace_a_byte(path: Path, choose: Choose) -> None:
    content = bytearray(path.read_bytes())
    at = choose.randrange(len(content))
    content[at] = (content[at] + choose.randrange(1, 256)) % 256
    path.write_bytes(content)


def truncate(path: Path, choose: Choose) -> None:
    path.write_bytes(path.read_bytes()[: choose.randrange(path.stat().st_size)])


def lengthen(path: Path, choose: Choose) -> None:
    path.write_bytes(path.read_bytes() + choose.randbytes(choose.randint(1, 100)))


def fill_with_zeros(path: Path, _: Choose) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path, _: Choose) -> None:
    path.unlink()


def add_a_file(path: Path, choose: Choose) -> None:
    path.with_name(f"extra-{choose.randrange(100)}").write_bytes(b"x")


def make_a_folder_of_it(path: Path, _: Choose) -> None:
    path.unlink()
    path.mkdir()


def link_elsewhere(path: Path, _: Choose) -> None:
    moved = path.parents[5] / f"moved-{path.name}"
    shutil.copy(path, moved)
    path.unlink()
    path.symlink_to(moved)


def swap_with_another(path: Path, choose: Choose) -> None:
    mine = path.read_bytes()
    others = [other for other in path.parents[5].rglob("*") if other.is_file() and other.read_bytes() != mine]
    other = choose.choice(sorted(others))
    path.write_bytes(other.read_bytes())
    other.write_bytes(mine)


def delete_the_artifact(path: Path, _: Choose) -> None:
    shutil.rmtree(next(parent for parent in path.parents if parent.parent.parent.name in ALL_STAGES))


WAYS: tuple[Callable[[Path, Choose], None], ...] = (
    flip_a_bit, replace_a_byte, truncate, lengthen, fill_with_zeros, delete, add_a_file, make_a_folder_of_it,
    link_elsewhere, swap_with_another, delete_the_artifact,
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One store spoiled, and run again.

    Attributes:
        way, stage: how, and an artifact of which stage.
        verified: whether a deep check finds it.
        same: whether the run's dataset is the whole store's to the bit.
        error: what the run raised instead, a LenspipeError.
    """

    way: str
    stage: str
    verified: bool
    same: bool
    error: str = ""


def spoil_and_go_on(
    template: Path, root: Path, expected: dict[str, Any], choose: Choose, way: Callable[[Path, Choose], None]
) -> Outcome:
    """Spoil a copy of a finished store, and run its recipe.

    The dataset is removed first in three of four rounds, and some readouts in half of these, so that what is spoiled is
    used.
    """
    shutil.copytree(template, root, symlinks=True)
    recipe, store = small_recipe(root), ArtifactStore(root)
    plan = make_plan(recipe)
    if choose.random() < 0.75:
        store.remove("assemble", plan.dataset)
        if choose.random() < 0.5:
            for shard in plan.shards:
                for cell in shard.cells:
                    if choose.random() < 0.5:
                        store.remove("read", cell.read)
    stage = choose.choice([stage for stage in ALL_STAGES if list(store.keys(stage))])
    files = sorted(path for path in (root / stage).rglob("*") if path.is_file() and path.stat().st_size)
    way(choose.choice(files), choose)
    damaged = [(of, key) for of in ALL_STAGES for key in store.keys(of) if store.is_damaged(of, key, deep=True)]
    verified = bool(damaged) or way is delete_the_artifact
    try:
        path = carry_out(recipe)
        if store.is_damaged("assemble", plan.dataset, deep=True):  # no stage uses it; who verifies it is told
            store.set_aside("assemble", plan.dataset)
            path = carry_out(recipe)
        return Outcome(way.__name__, stage, verified, contents(path) == expected)
    except LenspipeError as error:
        return Outcome(way.__name__, stage, verified, False, str(error))


def main() -> None:
    """Spoil many stores and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    choose = Choose(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder, "a", "b", "c", "template")
        expected = contents(carry_out(small_recipe(template)))
        outcomes = []
        for _ in range(asked.rounds):
            with tempfile.TemporaryDirectory(dir=template.parent) as root:
                outcomes.append(spoil_and_go_on(template, Path(root, "store"), expected, choose, choose.choice(WAYS)))
    print(f"{sum(found.verified for found in outcomes)} of {len(outcomes)} were found by a deep check")
    print(f"{sum(found.same for found in outcomes)} of {len(outcomes)} gave the same dataset, to the bit")
    print(f"stages: {dict(Counter(found.stage for found in outcomes))}")
    print(f"ways: {dict(Counter(found.way for found in outcomes))}")
    for found in outcomes:
        if not (found.same and found.verified):
            print(found)
    if not all(found.same and found.verified for found in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
