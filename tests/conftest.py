"""Shared settings and models: everything runs offline, on the CPU, with a cache folder and a Prefect of its own."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
GGUF = ROOT / "data/models/SmolLM2-135M-Instruct.Q4_1.gguf"

# Read when the libraries are first imported, so set before any test module is.
os.environ.update(
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_LOGGING_LEVEL="CRITICAL",
    PREFECT_SERVER_LOGGING_LEVEL="CRITICAL",
)
os.environ.pop("PREFECT_API_URL", None)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # a GPU's kernels run on the CPU


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Prefect home of our own; the user's is never touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
        yield


@pytest.fixture(scope="session")
def prefect_server(home: None) -> Iterator[None]:
    """A real Prefect server, started once."""
    # Prefect reads its settings when it is first imported, so not before `home`.
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings  # noqa: PLC0415
    from prefect.testing.utilities import prefect_test_harness  # noqa: PLC0415

    with (
        prefect_test_harness(server_startup_timeout=180),
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A small recipe on the random model of the repository, as plain values."""
    return {
        "model": {"source": str(ROOT / "data/tiny-model")},
        "corpus": {"source": str(ROOT / "data/corpora/recall.jsonl"), "limit": 12, "columns": ["category"]},
        "read": {"top_k": 4, "tracked": [" the", 300], "answer": "answer"},
        "run": {"store": str(tmp_path / "store"), "shard_size": 200, "batch_tokens": 64, "device": "cpu"},
    }


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[..., str]:
    """Write texts as a .jsonl corpus and return its path."""

    def write(texts: list[str], name: str = "corpus.jsonl", **columns: list[Any]) -> str:
        path = tmp_path / name
        rows = [{"text": text, **{key: column[i] for key, column in columns.items()}} for i, text in enumerate(texts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's GGUF file, which `make test` fetches."""
    assert GGUF.is_file(), f"{GGUF} is missing: run `make test`, or scripts/fetch_demo_model.py"
    return GGUF
