"""Write: a small finished store of this version, zipped: `python -m tests.stores.write`, once before each release."""

import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

from lenspipe.recipe import make_recipe
from lenspipe.upkeep import ALL_STAGES
from tests.chaos.small import carry_out
from tests.conftest import ROOT

FOLDER = Path(__file__).parent


def main() -> None:
    """Write it, unless there is one of this version."""
    target = FOLDER / f"{version('lenspipe')}.zip"
    if target.exists():
        raise SystemExit(f"{target} is there: it is what that version wrote, and stays")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        values = {
            "model": {"source": str(ROOT / "data/tiny-model")},
            "corpus": {"source": str(ROOT / "data/corpora/recall.jsonl"), "limit": 3, "columns": ["category"]},
            "capture": {"layers": [0, 4]},
            "read": {"top_k": 2, "answer": "answer", "measures": ["topk", "logsumexp", "target", "kl_final"]},
            "run": {"store": str(store), "device": "cpu"},
        }
        carry_out(make_recipe(values))
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as packed:
            for stage in ALL_STAGES:
                for path in sorted((store / stage).rglob("*")):
                    if path.is_file():
                        packed.write(path, path.relative_to(store))
    print(target)


if __name__ == "__main__":
    main()
