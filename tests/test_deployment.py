"""The deployment of prefect.yaml, on a server, a work pool and a worker of its own, as an operator would run it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import lenspipe
from tests.conftest import ROOT

pytestmark = [pytest.mark.deploy, pytest.mark.slow]
PREFECT = str(Path(sys.executable).with_name("prefect"))


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Prefect server on a free port; ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "LENSPIPE_HOME": str(ROOT),
    }
    command = [PREFECT, "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    server = subprocess.Popen(command, env=found, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(360):
            try:
                if httpx.get(f"{found['PREFECT_API_URL']}/health", timeout=1).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield found
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def test_the_deployment_runs_a_recipe(environment: dict[str, str], tmp_path: Path) -> None:
    def prefect(*words: str) -> str:
        done = subprocess.run(
            [PREFECT, "--no-prompt", *words],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    store = tmp_path / "store"
    prefect("work-pool", "create", "lenspipe", "--type", "process")
    prefect("deploy", "--all")
    worker = subprocess.Popen(
        [PREFECT, "worker", "start", "--pool", "lenspipe", "--run-once"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        settings = f'settings=["run.store={store}", "corpus.limit=5"]'
        done = prefect("deployment", "run", "lenspipe-corpus/nightly", "--param", settings, "--watch")
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(60)
    assert "Completed" in done or "completed" in done
    datasets = list(store.glob("assemble/*/*/dataset.zarr"))
    assert len(datasets) == 1
    assert lenspipe.open_dataset(datasets[0]).sizes["document"] == 5
    shutil.rmtree(store)
