"""Recipe: what a TOML file may say, and how a mistake in it is explained."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from lenspipe.errors import RequestError
from lenspipe.recipe import load_recipe, make_recipe
from lenspipe.variables import MEASURES

MINIMAL = '[model]\nsource = "m"\n[corpus]\nsource = "texts.txt"\n'


def make(**groups):
    corpus = {"source": "texts.txt"} if "hub" not in groups.get("corpus", {}) else {}
    return make_recipe(groups | {"model": {"source": "m"}, "corpus": corpus | groups.get("corpus", {})})


def problems(**groups):
    with pytest.raises(RequestError) as caught:
        make(**groups)
    first, *found = str(caught.value).splitlines()
    assert first == "recipe is not a valid recipe:"
    return [line.removeprefix("  ") for line in found]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def test_defaults_are_pinned(file):
    assert load_recipe(file).as_dict() == {
        "model": {
            "source": "m",
            "revision": None,
            "dtype": "auto",
            "attention": "auto",
            "trust_remote_code": False,
            "parts": dict.fromkeys(["blocks", "chain", "head", "multiply", "divide", "softcap"]),
        },
        "corpus": {
            "source": ["texts.txt"],
            "hub": None,
            "hub_config": None,
            "split": "train",
            "revision": None,
            "unit": "file",
            "text": "text",
            "messages": None,
            "columns": [],
            "limit": None,
            "max_length": None,
            "overflow": "split",
            "stride": None,
            "bos": "auto",
        },
        "capture": {"sites": None, "layers": "all", "positions": "all", "residuals": "keep", "nonfinite": "refuse"},
        "read": {
            "lens": ["logit"],
            "uncovered": "refuse",
            "precision": "model",
            "measures": ["topk", "logsumexp", "entropy", "target", "kl_final"],
            "top_k": 10,
            "tracked": [],
            "token_sets": None,
            "answer": None,
            "answer_prefix": " ",
        },
        "run": {
            "store": "lenspipe-store",
            "shard_size": 200_000,
            "batch_tokens": 4096,
            "max_bytes": None,
            "memory": 2**30,
            "device": "auto",
            "runner": "threads",
            "workers": 1,
            "address": None,
            "api": None,
        },
    }


def test_plain_values_are_json(file):
    recipe = load_recipe(file)
    assert json.loads(json.dumps(recipe.as_dict())) == recipe.as_dict()


def test_plain_values_make_the_same_recipe_again(file):
    recipe = load_recipe(file, ["read.tracked=[' Paris', 7]", "capture.positions=[0, -1]"])
    assert make_recipe(recipe.as_dict(), base=file.parent) == recipe


def test_a_recipe_is_frozen(file):
    with pytest.raises(ValidationError, match="frozen"):
        load_recipe(file).read.top_k = 3


def test_tracked_and_answer_are_measures_of_their_own():
    read = {"measures": ["entropy"], "tracked": [" yes"], "answer": "label"}
    assert make(read=read).measures == {"entropy", "tracked", "answer"}
    assert make(read={"measures": ["entropy", "topk"]}).measures == {"entropy", "topk"}


def test_columns_hold_the_answer_once():
    assert make(corpus={"columns": ["a", "b", "a"]}, read={"answer": "c"}).columns == ("a", "b", "c")
    assert make(corpus={"columns": ["a", "b"]}, read={"answer": "a"}).columns == ("a", "b")


@pytest.mark.parametrize(
    "group, wrong, meant",
    [
        ("read", "topk", "top_k"),
        ("read", "mesures", "measures"),
        ("corpus", "max_len", "max_length"),
        ("corpus", "sources", "source"),
        ("model", "dtpye", "dtype"),
        ("run", "batch_token", "batch_tokens"),
        ("capture", "layer", "layers"),
    ],
)
def test_an_unknown_name_gives_the_nearest(group, wrong, meant):
    values = {group: {wrong: 1}} | ({"model": {"source": "m", wrong: 1}} if group == "model" else {})
    with pytest.raises(RequestError, match=rf"{group}\.{wrong}: unknown name; did you mean '{meant}'\?"):
        make_recipe({"model": {"source": "m"}, "corpus": {"source": "a.txt"}} | values)


def test_an_unknown_group_gives_the_nearest():
    assert problems(captures={}) == ["captures: unknown name; did you mean 'capture'?"]


def test_a_name_like_no_other_gives_all_that_are_known():
    assert problems(xyzzy={}) == ["xyzzy: unknown name; known are model, corpus, capture, read, run"]


def test_all_problems_are_listed():
    found = problems(
        model={"sorce": "m"},
        corpus={"source": "a.txt", "unit": "word", "limit": 0},
        read={"topk": 5, "lens": []},
        run={"memory": "much"},
    )
    names = {line.split(":")[0] for line in found}
    assert names == {"corpus.unit", "corpus.limit", "read.topk", "read.lens", "run.memory"}


def test_missing_groups_and_names_are_described():
    with pytest.raises(RequestError) as caught:
        make_recipe({"model": {}})
    assert "model.source: missing; a local folder" in str(caught.value)
    assert "corpus: missing; a recipe needs a [corpus] group" in str(caught.value)


@pytest.mark.parametrize("value", ["10", True, 10.0, 0, -1, None, [10]])
def test_top_k_is_a_whole_number_from_one(value):
    (problem,) = problems(read={"top_k": value})
    assert problem.startswith("read.top_k: ")
    assert problem.endswith(f"found {value!r}")


@pytest.mark.parametrize(
    "group, name, value",
    [
        ("corpus", "max_length", 1),
        ("corpus", "max_length", "64"),
        ("corpus", "limit", 0),
        ("corpus", "columns", "a"),
        ("corpus", "text", 3),
        ("corpus", "bos", "yes"),
        ("corpus", "overflow", "drop"),
        ("capture", "residuals", True),
        ("capture", "layers", "last"),
        ("capture", "layers", ["1"]),
        ("capture", "positions", "first"),
        ("capture", "positions", [True]),
        ("read", "tracked", [True]),
        ("read", "tracked", [1.5]),
        ("read", "tracked", "yes"),
        ("run", "workers", 0),
        ("run", "runner", "slurm"),
        ("run", "shard_size", 0),
        ("run", "batch_tokens", "4096"),
    ],
)
def test_values_of_another_type_or_range_are_refused(group, name, value):
    found = problems(**{group: {name: value}})
    assert all(line.startswith(f"{group}.{name}") for line in found)


def test_trust_is_true_or_false_and_nothing_like_it():
    with pytest.raises(RequestError, match=r"model\.trust_remote_code: .*found 1"):
        make_recipe({"model": {"source": "m", "trust_remote_code": 1}, "corpus": {"source": "a.txt"}})


@pytest.mark.parametrize("name", ["sites", "layers", "positions"])
def test_an_empty_list_in_capture_is_refused(name):
    (problem,) = problems(capture={name: []})
    assert f"{name} is an empty list: nothing would be read" in problem


def test_no_measures_are_refused():
    assert problems(read={"measures": []})[0].startswith("read.measures: ")


@pytest.mark.parametrize(
    "name, meant",
    [
        ("topk_id", "topk"),
        ("topk_logit", "topk"),
        ("target_rank", "target"),
        ("target_id", "target"),
        ("entrpy", "entropy"),
        ("kl_fnal", "kl_final"),
        ("log_sum_exp", "logsumexp"),
    ],
)
def test_an_unknown_measure_gives_the_one_that_is_meant(name, meant):
    expected = f"read.measures.1: unknown measure {name!r}; did you mean {meant!r}?"
    assert problems(read={"measures": ["entropy", name]}) == [expected]


def test_a_measure_like_no_other_gives_all_that_are_known():
    (problem,) = problems(read={"measures": ["xyzzy"]})
    assert problem.endswith("known are " + ", ".join(MEASURES))


def test_source_may_be_one_name_or_a_list():
    assert make(corpus={"source": "a.txt"}).corpus.source == ["a.txt"]
    assert make(corpus={"source": ["a.txt", "b/*.txt"]}).corpus.source == ["a.txt", "b/*.txt"]
    assert make(capture={"sites": "resid_post"}).capture.sites == ["resid_post"]


@pytest.mark.parametrize("corpus", [{}, {"source": []}, {"source": "a.txt", "hub": "wikitext"}])
def test_source_and_hub_exclude_each_other_and_one_is_needed(corpus):
    with pytest.raises(RequestError, match="corpus: name either source"):
        make_recipe({"model": {"source": "m"}, "corpus": corpus})


def test_hub_alone_is_enough():
    assert make(corpus={"hub": "wikitext"}).corpus.source == []


@pytest.mark.parametrize("overflow", ["truncate", "error"])
def test_stride_needs_split(overflow):
    assert 'stride needs overflow = "split"' in problems(corpus={"stride": 4, "overflow": overflow})[0]


def test_a_stride_that_skips_tokens_is_refused():
    assert "stride 9 is more than max_length 8" in problems(corpus={"stride": 9, "max_length": 8})[0]
    assert make(corpus={"stride": 8, "max_length": 8}).corpus.stride == 8


@pytest.mark.parametrize(
    "text, amount",
    [
        (2_000_000, 2_000_000),
        ("1048576", 1_048_576),
        ("1048576B", 1_048_576),
        ("2048 KiB", 2_097_152),
        ("512 MiB", 536_870_912),
        ("512MiB", 536_870_912),
        (" 1.5 GiB ", 1_610_612_736),
        ("2000 KB", 2_000_000),
        ("1.5 MB", 1_500_000),
        ("2GB", 2_000_000_000),
    ],
)
def test_memory_reads_units(text, amount):
    assert make(run={"memory": text}).run.memory == amount


@pytest.mark.parametrize("text", ["", "lots", "MiB", ".", "1..5 GiB", "-5 GiB", "5 TiB", "5 gib", "1e9", "1 GiB free"])
def test_what_is_no_amount_of_memory_is_refused(text):
    (problem,) = problems(run={"memory": text})
    assert problem.startswith(f"run.memory: {text!r} is no amount of bytes: write a number, or a number with KiB")


@pytest.mark.parametrize("value", [True, 5e8, "1023 KiB", 1000, 0])
def test_memory_of_another_type_or_too_little_is_refused(value):
    (problem,) = problems(run={"memory": value})
    assert problem.startswith("run.memory: Input should be")


def test_overrides_are_toml_values(file):
    recipe = load_recipe(
        file,
        [
            "read.top_k=20",
            'read.answer_prefix=""',
            "capture.layers=[0, -1]",
            "model.trust_remote_code=true",
            "read.tracked = [' a', 3]",
            "run.memory=64 MiB",
        ],
    )
    assert recipe.read.top_k == 20
    assert recipe.read.answer_prefix == ""
    assert recipe.capture.layers == [0, -1]
    assert recipe.model.trust_remote_code is True
    assert recipe.read.tracked == [" a", 3]
    assert recipe.run.memory == 64 * 2**20


@pytest.mark.parametrize("word", ["bfloat16", " float16 "])
def test_a_bare_word_is_a_string(file, word):
    assert load_recipe(file, [f"model.dtype={word}"]).model.dtype == word.strip()


def test_an_override_may_hold_an_equals_sign(file):
    assert load_recipe(file, ["model.source=a=b"]).model.source == "a=b"


def test_the_last_override_wins_over_the_file_and_the_others(file):
    file.write_text(MINIMAL + "[read]\ntop_k = 3\nmeasures = ['topk']\n", encoding="utf-8")
    recipe = load_recipe(file, ["read.top_k=4", "read.top_k=5"])
    assert recipe.read.top_k == 5
    assert recipe.read.measures == ["topk"]


@pytest.mark.parametrize("override", ["top_k=3", "read.top_k", "read.=3", "", "=", "read"])
def test_an_override_of_another_form_is_refused(file, override):
    with pytest.raises(RequestError, match=r"write group\.name=value"):
        load_recipe(file, [override])


def test_an_override_inside_what_is_no_group_is_refused(file):
    file.write_text("read = 3\n" + MINIMAL, encoding="utf-8")
    with pytest.raises(RequestError, match="read is not a group"):
        load_recipe(file, ["read.top_k=3"])


def test_an_override_is_checked_like_the_file(file):
    with pytest.raises(RequestError, match=r"read\.topk: unknown name; did you mean 'top_k'\?"):
        load_recipe(file, ["read.topk=3"])
    with pytest.raises(RequestError, match=r"read\.top_k: .*found 'ten'"):
        load_recipe(file, ["read.top_k=ten"])


def test_a_file_that_is_not_toml_is_refused_with_its_line(file):
    file.write_text(MINIMAL + "top_k 10\n", encoding="utf-8")
    with pytest.raises(RequestError, match=r"recipe\.toml is not TOML: .*line 5"):
        load_recipe(file)


def test_a_file_that_is_not_utf8_is_refused(file):
    file.write_bytes(b'[model]\nsource = "\xff"\n')
    with pytest.raises(RequestError, match=r"cannot read the recipe .*recipe\.toml"):
        load_recipe(file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"no recipe at .*none\.toml"):
        load_recipe(tmp_path / "none.toml")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(RequestError, match="cannot read the recipe"):
        load_recipe(tmp_path)


def test_an_invalid_file_is_named(file):
    file.write_text('[model]\nsource = "m"\n', encoding="utf-8")
    with pytest.raises(RequestError, match=r"recipe\.toml is not a valid recipe:\n  corpus: missing"):
        load_recipe(file)


def test_paths_start_from_the_folder_of_the_recipe(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe(Path("..") / "recipe.toml")
    assert recipe.store == tmp_path / "lenspipe-store"
    assert recipe.path("a/../b/*.txt") == tmp_path / "b" / "*.txt"


def test_an_absolute_path_stays(file, tmp_path):
    assert load_recipe(file, ["run.store=/somewhere/else"]).store == Path("/somewhere/else")


def test_a_tilde_is_the_home_folder(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_recipe(file, ["run.store=~/kept"]).store == tmp_path / "home" / "kept"


def test_where_a_recipe_lies_is_no_part_of_its_values(file, tmp_path):
    other = tmp_path / "other.d"
    other.mkdir()
    (other / "recipe.toml").write_text(MINIMAL, encoding="utf-8")
    assert load_recipe(file).as_dict() == load_recipe(other / "recipe.toml").as_dict()
