"""S3: a real server of objects, SeaweedFS, for as long as the tests that need it."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WEED = Path(sys.executable).with_name("weed")
SECRET = "the-secret-of-the-tests"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def server(folder: Path) -> Iterator[dict[str, str]]:
    """Start it; yields the environment in which it is found."""
    identity = {"name": "tests", "credentials": [{"accessKey": "key", "secretKey": SECRET}]}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    (folder / "s3.json").write_text(json.dumps({"identities": [{**identity, "actions": actions}]}))
    (folder / "data").mkdir()
    # SeaweedFS listens for gRPC at a port 10,000 above each; these stay in range.
    ports = {name: 20_000 + free_port() % 20_000 for name in ("master", "volume", "filer", "s3")}
    command = [str(WEED), "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [f"-s3.config={folder / 's3.json'}", "-master.telemetry=false", "-volume.preStopSeconds=1"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    url = f"http://127.0.0.1:{ports['s3']}"
    try:
        deadline = time.monotonic() + 120
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text()[-3000:])
            time.sleep(0.2)
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        yield {"AWS_ENDPOINT_URL": url, **keys}
    finally:
        process.terminate()
        process.wait(timeout=60)
        shutil.rmtree(folder / "data", ignore_errors=True)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2)
    except urllib.error.HTTPError:
        return True  # it asks who we are
    except OSError:
        return False
    return True
