"""The command line as a person or a script meets it: output, messages, exit statuses, and what is not imported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import safetensors.torch
import transformers

from tests.conftest import ROOT

LENSPIPE = str(Path(sys.executable).with_name("lenspipe"))
TINY = str(ROOT / "data/recipes/tiny.toml")


def lenspipe(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LENSPIPE, *words],
        capture_output=True,
        check=False,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def first(store: str) -> subprocess.CompletedProcess[str]:
    """The tiny recipe, run once, with no Prefect server but its own."""
    return lenspipe("run", TINY, "--set", f"run.store={store}")


@pytest.fixture(scope="module")
def dataset(first: subprocess.CompletedProcess[str]) -> str:
    return first.stdout.splitlines()[-1]


def test_run_prints_the_datasets_path_alone(first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("\n") == 1
    assert Path(first.stdout.strip()).joinpath("zarr.json").is_file()
    assert "capture: 1,082 tokens" in first.stderr
    assert "Traceback" not in first.stderr


def test_a_run_keeps_prefect_to_itself(first: subprocess.CompletedProcess[str], store: str, tmp_path: Path) -> None:
    assert not (Path(store) / "prefect").exists()
    home = tmp_path / "home"
    home.mkdir()
    done = lenspipe("run", TINY, "--set", f"run.store={tmp_path / 'store'}", "-q", HOME=str(home))
    assert done.returncode == 0
    assert done.stderr == ""
    assert not (home / ".prefect").exists()


def test_a_second_run_says_that_all_is_cached_and_loads_nothing(dataset: str, store: str) -> None:
    code = (
        "import sys; from lenspipe.cli import main\n"
        "try: main()\n"
        "except SystemExit as end:\n"
        "    heavy = ('torch', 'transformers', 'prefect', 'zarr', 'xarray', 'pandas')\n"
        "    print(end.code, *[m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "run", TINY, "--set", f"run.store={store}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "everything is cached" in done.stderr
    assert done.stdout.splitlines()[-2:] == [dataset, "0"]


def test_a_server_that_is_named_and_silent_gets_one_clear_error(dataset: str, store: str) -> None:
    done = lenspipe("run", TINY, "--set", f"run.store={store}", "--set", "run.api=http://127.0.0.1:9/api")
    assert done.returncode == 1
    assert "error: the Prefect server cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("plan", TINY), ("--help",), ("show", "{dataset}")])
def test_these_never_import_torch(dataset: str, store: str, words: tuple[str, ...]) -> None:
    code = (
        "import sys; from lenspipe.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*[m in sys.modules for m in ('torch', 'transformers', 'prefect')])"
    )
    given = [word.format(dataset=dataset) for word in words]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False False False", done.stderr


def test_plan_counts_what_would_be_redone(dataset: str, store: str) -> None:
    done = lenspipe("plan", TINY, "--set", f"run.store={store}", "--set", "read.top_k=7")
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if len(line.split()) == 4}
    assert rows["capture"] == ["20", "20", "0"]
    assert rows["read"] == ["20", "0", "20"]
    assert "1,082 tokens" in done.stdout
    assert Path(dataset).exists()


def test_show_prints_one_line_a_layer(dataset: str) -> None:
    done = lenspipe("show", dataset, "--by", "category")
    assert done.returncode == 0
    assert "identity gate: logits differ by" in done.stdout
    layers = [line.split()[0] for line in done.stdout.splitlines() if "resid_" in line]
    assert layers == ["0", "1", "2", "3", "4"]
    assert "share of answers ranked first, by category" in done.stdout


@pytest.mark.parametrize("words", [(), ("--document", "3"), ("--by", "category"), ("--target", " the")])
def test_plot_writes_a_picture_with_something_on_it(dataset: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = lenspipe("plot", dataset, "--output", str(tmp_path / "a.png"), *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pixels = matplotlib.image.imread(tmp_path / "a.png")
    assert min(pixels.shape[:2]) > 250
    assert pixels[..., :3].std() > 0.02


def test_lens_reads_one_prompt() -> None:
    done = lenspipe("lens", "The capital of France is", "--model", str(ROOT / "data/tiny-model"), "--top-k", "3")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["4", "3", "2", "1", "0"]
    assert rows[0][2] == "0.00"
    assert done.stdout.count("%") == 15


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model folders, each broken in one way."""
    root = tmp_path_factory.mktemp("models")
    tiny = ROOT / "data/tiny-model"

    def copy(name: str, *left_out: str, **config: Any) -> Path:
        folder = root / name
        folder.mkdir()
        for path in tiny.iterdir():
            if not path.name.startswith(left_out or ("nothing",)):
                (folder / path.name).write_bytes(path.read_bytes())
        if config:
            values = json.loads((tiny / "config.json").read_text()) | config
            (folder / "config.json").write_text(json.dumps(values))
        return folder

    headless = copy("headless")
    weights = safetensors.torch.load_file(headless / "model.safetensors")
    del weights["lm_head.weight"]
    safetensors.torch.save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    copy("base", architectures=["LlamaModel"])
    copy("encoder", architectures=["BertForMaskedLM"], model_type="bert")
    copy("seq2seq", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)
    copy("weightless", "model.")
    copy("mute", "tokenizer")
    (root / "empty").mkdir()
    bert = transformers.BertConfig(
        vocab_size=384,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertLMHeadModel(bert).save_pretrained(copy("both ways", "model", "config"))
    return {path.name: str(path) for path in root.iterdir()}


def refused(values: list[str], *pieces: str, status: int = 2, store: str = "unused-store") -> None:
    settings = [word for value in [f"run.store={store}", *values] for word in ("--set", value)]
    done = lenspipe("run", TINY, *settings)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    error = done.stderr[done.stderr.index("error: ") :]
    for piece in pieces:
        assert piece in error
    assert len(error) < 1500


@pytest.mark.parametrize(
    "setting, pieces",
    [
        ("corpus.source=nowhere.jsonl", ["'nowhere.jsonl'", "no file there"]),
        ("corpus.text=txt", ["line 1", "no column 'txt'", "found text, answer, category"]),
        ("capture.sites=['resid_pst.1']", ["unknown site 'resid_pst.1'", "Did you mean 'resid_post'"]),
        ("capture.sites=['resid_post.9']", ["4 blocks", "resid_post.0 to resid_post.3"]),
        ("capture.layers=[7]", ["unknown layer 7", "0 (the input of the first block) to 4"]),
        ("read.top_k=-1", ["read.top_k", "greater than or equal to 1", "found -1"]),
        ("read.top_k=1000", ["read.top_k is 1000", "384 tokens"]),
        ("read.topk=3", ["read.topk: unknown name", "did you mean 'top_k'"]),
        ("read.measures=['topk_id']", ["unknown measure 'topk_id'", "did you mean 'topk'"]),
        ("read.tracked=[384]", ["read.tracked id 384", "0 to 383"]),
        ("corpus.max_length=300", ["corpus.max_length is 300", "256 positions"]),
        ("corpus.columns=['position']", ["column 'position' cannot be kept"]),
        ("run.memory='lots'", ["'lots' is no amount of bytes"]),
        ("run.memory='1 GiBi'", ["no amount of bytes"]),
        ("model.source='no-such/model-anywhere'", ["'no-such/model-anywhere'", "no such folder here"]),
        ("model.revision='v9'", ["model.revision is for hub ids"]),
        ("nonsense", ["write group.name=value"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_request_gets_one_clear_error(setting: str, pieces: list[str], tmp_path: Path) -> None:
    refused([setting], *pieces, store=str(tmp_path / "store"))
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").glob("[cr]*"))


@pytest.mark.parametrize(
    "name, pieces",
    [
        ("base", ["LlamaModel", "without a language-model head"]),
        ("encoder", ["BertForMaskedLM", "an encoder"]),
        ("seq2seq", ["an encoder-decoder"]),
        ("weightless", ["has no weights"]),
        ("mute", ["has no tokenizer"]),
        ("empty", ["no config.json"]),
        ("headless", ["lacks lm_head.weight", "at random"]),
        ("both ways", ["see later tokens", "an encoder"]),
    ],
)
def test_a_checkpoint_that_cannot_be_read_gets_one_clear_error(
    models: dict[str, str], name: str, pieces: list[str], tmp_path: Path
) -> None:
    refused([f"model.source='{models[name]}'"], *pieces, store=str(tmp_path / "store"))
    assert not (tmp_path / "store/capture").exists()


def test_bad_lines_of_a_corpus_are_named(tmp_path: Path, write_corpus: Callable[..., str]) -> None:
    path = Path(write_corpus(["fine", "fine"]))
    asked = ["corpus.columns=[]", f"corpus.source='{path}'"]
    path.write_text('{"text": "fine", "answer": "x"}\n{"text": \n')
    refused(asked, "line 2", "bad JSON", store=str(tmp_path / "s"))
    path.write_text("")
    refused(asked, "the corpus is empty", store=str(tmp_path / "s"))
    path.write_text('{"text": "", "answer": "x"}\n')
    refused(asked, "line 1", "empty", store=str(tmp_path / "s"))
    path.write_text('{"text": "<s>Hello", "answer": "x"}\n')
    refused(asked, "line 1", "two BOS", store=str(tmp_path / "s"))


def test_a_store_that_cannot_be_written_is_a_failed_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused([], "cannot be written", status=1, store=str(tmp_path / "file/store"))


def test_an_unknown_dataset_is_a_wrong_request(tmp_path: Path) -> None:
    done = lenspipe("show", str(tmp_path))
    assert done.returncode == 2
    assert "no dataset at" in done.stderr


def test_a_stranger_opens_the_dataset_without_lenspipe_and_without_a_warning(dataset: str, tmp_path: Path) -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "sys.modules['lenspipe'] = None\n"
        "import xarray as xr; ds = xr.open_zarr(sys.argv[1])\n"
        "assert ds.kl_final.units == 'nats' and ds.topk_id.dims == ('layer', 'token', 'k')\n"
        "assert all({'long_name', 'units', 'definition'} <= set(v.attrs) for v in ds.variables.values())\n"
        "assert set(ds.sizes) == {'layer', 'token', 'k', 'document', 'tracked', 'vocab'}\n"
        "print(str(ds.vocab_token.values[ds.topk_id.sel(layer=4).values[0, 0]]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, dataset], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_dataset_of_one_row_at_one_layer_can_be_shown_and_drawn(tmp_path: Path) -> None:
    settings = [f"run.store={tmp_path}", "corpus.limit=1", "capture.positions=last", "capture.layers=[2]"]
    settings += ['read.measures=["entropy"]', "read.tracked=[]"]
    dataset = lenspipe("run", TINY, "-q", *(word for value in settings for word in ("--set", value))).stdout.strip()
    assert "resid_post.1" in lenspipe("show", dataset).stdout
    for words in [(), ("--by", "category")]:
        done = lenspipe("plot", dataset, "--output", str(tmp_path / "a.png"), *words)
        assert (done.returncode, done.stderr) == (0, "")
    done = lenspipe("plot", dataset, "--output", str(tmp_path / "a.png"), "--document", "0")
    assert done.returncode == 2
    assert "needs topk and logsumexp" in done.stderr
