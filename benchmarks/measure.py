"""Measure: medians of ratios of interleaved pairs, and tables of them: absolute times mean little on busy machines."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"

Work = Callable[[], object]
Row = tuple[str, float]


def timed(work: Work) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(work: Work, floor: Work, pairs: int) -> float:
    """Median of work / floor over interleaved pairs, after one warm-up."""
    work()
    floor()
    return statistics.median(timed(work) / timed(floor) for _ in range(pairs))


def report(title: str, command: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table and write it to benchmarks/results, with what it was measured on."""
    cells = [[f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *cells))
    print(f"\n{title}\n{text}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    machine = f"{torch.get_num_threads()} threads, {cpu()}, torch {torch.__version__}"
    name = title.lower().replace(" ", "-")
    (RESULTS / f"{name}.md").write_text(f"# {title}\n\n`{command}`: {machine}.\n\n{text}\n")


def cpu() -> str:
    """What the processor can: the kind of its vector instructions."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    low = next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), "no bfloat16 instructions")
    return f"{torch.backends.cpu.get_cpu_capability()} with {low}"
