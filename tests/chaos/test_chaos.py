"""Some of what `make chaos` does, in processes of their own: forks need a parent that has not computed."""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("words", [("kills", "--kills", "16"), ("damage", "--rounds", "40")])
def test_killed_and_damaged_runs_end_with_the_same_dataset(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", f"tests.chaos.{words[0]}", *words[1:], "--seed", "7"]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    n = words[-1]
    said = {"kills": f"{n} went on to the same dataset", "damage": f"{n} of {n} were found by a deep check"}
    assert said[words[0]] in done.stdout
