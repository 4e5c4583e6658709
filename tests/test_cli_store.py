"""The command line on a store: it can be asked, interrupted, killed, and used by two at once."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lenspipe
from lenspipe.plan import make_plan
from lenspipe.recipe import load_recipe
from lenspipe.storage.artifacts import ArtifactStore
from tests.conftest import ROOT

LENSPIPE = str(Path(sys.executable).with_name("lenspipe"))
TINY = str(ROOT / "data/recipes/tiny.toml")
PROSE = f"""
[model]
source = "{ROOT / "data/tiny-model"}"
[corpus]
source = "{ROOT / "data/corpora/prose.txt"}"
unit = "paragraph"
[run]
store = "store"
shard_size = 2000
device = "cpu"
"""
ENVIRONMENT = {**os.environ, "COLUMNS": "200"}


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LENSPIPE, *words], capture_output=True, check=False, text=True, timeout=300, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one finished run."""
    store = tmp_path_factory.mktemp("finished") / "store"
    assert call("run", TINY, f"--set=run.store={store}", "-q").returncode == 0
    return store


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "store", symlinks=True))


def ask(*words: str, status: int = 0) -> str:
    done = call(*words)
    assert "Traceback" not in done.stderr
    assert done.returncode == status, done.stderr
    return done.stdout if status != 2 else done.stderr


def test_ls_lists_runs_and_stages(store: Path) -> None:
    said = ask("ls", str(store))
    assert re.search(r"\d{8}-\d{6}-[0-9a-f]{4} +finished +tiny-model on recall\.jsonl +40 +1,082 +5 ", said)
    assert re.search(r"capture +20 +\d", said)
    assert Path(said.splitlines()[-1].removeprefix("latest dataset: ")).joinpath("zarr.json").is_file()


def test_status_says_how_the_last_run_ended(store: Path) -> None:
    assert re.search(r"no run is in progress in .*; the last, .*, finished", ask("status", str(store)))


def test_verify_finds_a_flipped_byte_and_the_next_run_mends_it(store: Path) -> None:
    assert ask("verify", str(store), "--deep").splitlines()[-1] == "none damaged, by every byte"
    table = next((store / "read").rglob("arrays.safetensors"))
    content = bytearray(table.read_bytes())
    content[-1] ^= 1
    table.write_bytes(content)
    assert "none damaged" in ask("verify", str(store))
    said = ask("verify", str(store), "--deep", status=1)
    assert f"read artifact {table.parent.name[:12]} is not what was written: set aside" in said
    assert said.splitlines()[-1] == "1 damaged, by every byte"


def test_explain_diff_export_gc_and_prune_answer(store: Path, tmp_path: Path) -> None:
    here = f"--set=run.store={store}"
    assert "  top_k: 5 -> 2" in ask("explain", TINY, here, "--set=read.top_k=2")
    assert "assemble: 1 of 1 reused" in ask("explain", TINY, here)
    said = ask("diff", "last", "last", "--in", str(store))
    assert "recipe: the same" in said
    assert "numbers: 1,082 rows of the same documents, of 1,082 and 1,082" in said
    assert ask("export", "last", "--in", str(store), "-o", str(tmp_path / "p.json")) == f"{tmp_path / 'p.json'}\n"
    assert json.loads((tmp_path / "p.json").read_text())["numbers"]["entropy"]["mean"] > 0
    assert ask("gc", str(store), "--grace", "0s", "--dry-run") == "0 B (0 bytes) would be freed\n"
    assert re.search(r"capture +20 .*\n.*\n.*were freed", ask("prune", TINY, here, "--residuals"))
    assert re.search(r"capture +20 +0 +20", ask("plan", TINY, here))


@pytest.mark.parametrize(
    "words, message",
    [
        (["ls", "/nowhere.toml"], "no recipe at /nowhere.toml"),
        (["ls", str(ROOT / "data")], "is no store of lenspipe"),
        (["gc", "STORE", "--grace", "soon"], "--grace 'soon': write a number with s, m, h or d"),
        (["gc", "STORE", "--keep", "zzz"], "no runs of"),
        (["prune", TINY, "--set=run.store=STORE"], "say what to remove: --residuals"),
        (["reproduce", "/nowhere.json"], "is no provenance"),
        (["export", "zzz", "--in", "STORE"], "begin with 'zzz'"),
    ],
)
def test_a_wrong_request_gets_one_clear_error(words: list[str], message: str, finished: Path) -> None:
    said = ask(*(word.replace("STORE", str(finished)) for word in words), status=2)
    assert said.startswith("error: ")
    assert message in said


def test_plan_says_what_run_would_refuse(store: Path) -> None:
    said = ask("plan", TINY, f"--set=run.store={store}", "--set=read.top_k=2", "--set=run.max_bytes=1000")
    assert "would be refused: the run may write" in said
    assert "at the speed of run" in said
    refused = ask("run", TINY, f"--set=run.store={store}", "--set=read.top_k=2", "--set=run.max_bytes=1000", status=2)
    assert "run.max_bytes is 1,000" in refused


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """Begin a run of some dozen shards, whose store is in that folder."""
    (folder / "recipe.toml").write_text(PROSE)
    command = [LENSPIPE, "run", str(folder / "recipe.toml"), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def wait_for(happened: Callable[[], Any], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 200
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def some(store: Path, stage: str, n: int = 1) -> Callable[[], bool]:
    """Whether so many artifacts of a stage are there."""
    return lambda: len(list(ArtifactStore(store).keys(stage))) >= n


def processes(word: str, parent: int | None = None) -> set[int]:
    """Processes whose command has a word: all, or one process's children."""
    listed = subprocess.run(["ps", "axww", "-o", "pid,ppid,command"], capture_output=True, text=True, check=True).stdout
    found = [line.split(maxsplit=2) for line in listed.splitlines()[1:] if word in line]
    return {int(child) for child, of, _ in found if parent in (None, int(of))}


SERVER = "prefect.server.api.server:create_app"
"""In the command of a private Prefect server."""


@pytest.mark.slow
def test_a_run_that_is_stopped_or_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    store, before = tmp_path / "store", processes(SERVER)
    stopped = start(tmp_path)
    wait_for(some(store, "capture"), stopped)
    said = ask("status", str(store))
    assert re.search(r"run .*: tiny-model on prose\.txt, since", said)
    assert re.search(r"encode +\d+ +\d+ +100%", said)
    assert "is at work in" in call("gc", str(store), "--grace", "0s").stderr
    stopped.send_signal(signal.SIGINT)
    _, errors = stopped.communicate(timeout=100)
    assert stopped.returncode == 130
    assert errors.splitlines()[-1] == "stopped; every finished cell is safe: run the same command again to go on"
    assert "Traceback" not in errors
    assert "was stopped; run its recipe again to go on" in ask("status", str(store))
    n = len(list(ArtifactStore(store).keys("read")))

    killed = start(tmp_path)
    wait_for(some(store, "read", n + 1), killed)
    killed.kill()
    killed.communicate(timeout=100)
    assert "was killed; run its recipe again to go on" in ask("status", str(store))
    deadline = time.monotonic() + 60
    while processes(SERVER) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(SERVER) - before == set()

    ended = start(tmp_path)
    path, errors = ended.communicate(timeout=300)
    assert ended.returncode == 0
    assert lenspipe.open_dataset(path.strip()).sizes["token"] > 10_000
    states = [line.split()[1] for line in ask("ls", str(store)).splitlines() if re.match(r" \d{8}-", line)]
    assert states == ["stopped", "killed", "finished"]
    assert [path for path in (store / "drafts").rglob("*") if path.is_file()] == []
    assert list((store / "leases").iterdir()) == []


@pytest.mark.slow
@pytest.mark.dask
def test_a_killed_dask_worker_costs_the_run_nothing(tmp_path: Path) -> None:
    store, before = tmp_path / "store", processes(SERVER)
    run = start(tmp_path, "--set=run.runner=dask", "--set=run.workers=2")
    wait_for(some(store, "read"), run)
    assert len(processes(SERVER, run.pid)) == len(processes(SERVER) - before) == 1  # none of a worker's own
    os.kill(min(processes("spawn_main", run.pid)), signal.SIGKILL)
    path, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    assert "Traceback" not in errors
    # Whatever the cluster had been told, each cell is there, once, and right.
    plan = make_plan(load_recipe(tmp_path / "recipe.toml"))
    assert plan.is_done
    assert lenspipe.open_dataset(path.strip()).sizes["token"] == plan.n_tokens()
    assert "none damaged, by every byte" in ask("verify", str(store), "--deep")
    assert processes(SERVER) - before == set()


@pytest.mark.slow
def test_two_runs_at_once_share_the_work(tmp_path: Path) -> None:
    runs = [start(tmp_path), start(tmp_path)]
    ends = [run.communicate(timeout=400) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    assert ends[0][0] == ends[1][0]
    plan = make_plan(load_recipe(tmp_path / "recipe.toml"))
    assert plan.is_done
    for stage, total in (("capture", plan.n_tokens()), ("read", plan.n_rows())):
        done = [
            int(n.replace(",", "")) for _, errors in ends for n in re.findall(rf"^{stage}: ([\d,]+) ", errors, re.M)
        ]
        assert total <= sum(done) <= 1.1 * total
