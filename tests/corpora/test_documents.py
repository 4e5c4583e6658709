"""Documents: every format gives the same texts, and every fault is named with its file and line."""

import csv
import gzip
import io
import json
import math
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lenspipe.corpora.documents import Document, corpus_files, read_documents
from lenspipe.errors import RequestError
from lenspipe.recipe import make_recipe

settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")

TEXTS = ["first text", "zweiter, mit Ä und \U0001f600", 'third: "quoted"\nand on two lines', "  spaced  "]
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), min_size=1, max_size=30)


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def recipe_for(folder, source, read=None, **corpus):
    named = {} if source is None else {"source": source}
    return make_recipe({"model": {"source": "m"}, "corpus": named | corpus, "read": read or {}}, base=folder)


def documents(folder, source, **settings_):
    return list(read_documents(recipe_for(folder, source, **settings_)))


def texts(folder, source, **settings_):
    return [document.content for document in documents(folder, source, **settings_)]


def refusal(folder, source, **settings_):
    with pytest.raises(RequestError) as caught:
        documents(folder, source, **settings_)
    return str(caught.value)


def compressed(data, suffix):
    if suffix == ".gz":
        return gzip.compress(data)
    if suffix == ".zst":
        return pa.compress(data, codec="zstd", asbytes=True)
    return data


def as_jsonl(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def as_csv(records):
    # By hand, after RFC 4180: all fields quoted, quotes doubled.
    lines = [list(records[0]), *(record.values() for record in records)]
    quoted = [",".join('"' + str(field).replace('"', '""') + '"' for field in line) for line in lines]
    return "".join(line + "\r\n" for line in quoted).encode()


RECORDS = [{"text": text, "label": f"l{i}", "n": str(i)} for i, text in enumerate(TEXTS)]


def test_a_txt_file_is_one_document_without_its_last_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("eins\nzwei Ä\r\n\n drei\n\n".encode())
    (document,) = documents(tmp_path, "a.txt")
    assert document == Document("eins\nzwei Ä\r\n\n drei", {}, f"{tmp_path / 'a.txt'}, line 1")


def test_lines_of_a_txt_file_leave_blank_ones_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\n  two  \r\n \t\nthree")
    found = documents(tmp_path, "a.txt", unit="line")
    assert [d.content for d in found] == ["one", "  two  ", "three"]
    assert [d.origin.rpartition(" ")[2] for d in found] == ["1", "3", "5"]


def test_paragraphs_of_a_txt_file_end_at_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\n\none\nmore\n  \n\ntwo\r\n\r\nthree\n\n")
    found = documents(tmp_path, "a.txt", unit="paragraph")
    assert [d.content for d in found] == ["one\nmore", "two", "three"]
    assert [d.origin.rpartition(" ")[2] for d in found] == ["3", "7", "9"]


@pytest.mark.parametrize("unit, n", [("file", 1), ("line", 0), ("paragraph", 0)])
def test_an_empty_txt_file_is_one_empty_file_and_no_line(tmp_path, unit, n):
    (tmp_path / "a.txt").write_bytes(b"")
    assert texts(tmp_path, "a.txt", unit=unit) == [""] * n


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
    data = {"a.txt": b"hello", "a.jsonl": b'{"text": "hello"}', "a.csv": b"text\nhello\n"}[name]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + data)
    assert texts(tmp_path, name) == ["hello"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_a_compressed_txt_file_reads_as_the_plain_one(tmp_path, suffix, unit):
    data = "erste Zeile Ä\nzweite\n\ndritte\n".encode()
    (tmp_path / f"a.txt{suffix}").write_bytes(compressed(data, suffix))
    expected = {
        "file": ["erste Zeile Ä\nzweite\n\ndritte"],
        "line": ["erste Zeile Ä", "zweite", "dritte"],
        "paragraph": ["erste Zeile Ä\nzweite", "dritte"],
    }
    assert texts(tmp_path, f"a.txt{suffix}", unit=unit) == expected[unit]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_jsonl_and_csv_give_texts_and_kept_columns(tmp_path, kind, suffix):
    data = {"jsonl": as_jsonl, "csv": as_csv}[kind](RECORDS)
    (tmp_path / f"a.{kind}{suffix}").write_bytes(compressed(data, suffix))
    found = documents(tmp_path, f"a.{kind}{suffix}", columns=["n", "label"])
    assert [d.content for d in found] == TEXTS
    assert [dict(d.columns) for d in found] == [{"n": str(i), "label": f"l{i}"} for i in range(4)]


def test_parquet_gives_texts_and_typed_columns(tmp_path):
    table = pa.table({"n": [1, 2], "x": [0.5, None], "yes": [True, False], "text": ["a\nb", "Ä"], "no": [[1], [2]]})
    pq.write_table(table, tmp_path / "a.parquet")
    found = documents(tmp_path, "a.parquet", columns=["x", "yes", "n"])
    assert [d.content for d in found] == ["a\nb", "Ä"]
    assert [dict(d.columns) for d in found] == [{"x": 0.5, "yes": True, "n": 1}, {"x": None, "yes": False, "n": 2}]
    assert [d.origin for d in found] == [f"{tmp_path / 'a.parquet'}, row {i}" for i in (1, 2)]


def test_parquet_of_several_row_groups_is_read_whole_and_in_order(tmp_path):
    pq.write_table(pa.table({"text": [f"t{i}" for i in range(3000)]}), tmp_path / "a.parquet", row_group_size=700)
    found = documents(tmp_path, "a.parquet")
    assert [d.content for d in found] == [f"t{i}" for i in range(3000)]
    assert found[-1].origin.endswith("row 3000")


def test_the_text_column_has_the_name_asked_for(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([{"body": "b", "text": "t"}]))
    assert texts(tmp_path, "a.jsonl", text="body") == ["b"]


def test_blank_lines_in_jsonl_are_passed_over_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n  \r\n{"text": "b"}')
    assert [d.origin.rpartition(" ")[2] for d in documents(tmp_path, "a.jsonl")] == ["1", "4"]


@given(st.lists(PLAIN, max_size=6))
@settings(max_examples=50)
def test_any_text_comes_back_from_jsonl_as_it_was(tmp_path_factory, written):
    folder = tmp_path_factory.mktemp("jsonl")
    (folder / "a.jsonl").write_bytes(as_jsonl([{"text": text} for text in written]))
    assert texts(folder, "a.jsonl") == written


@given(st.lists(st.text(st.sampled_from('ab,"\n\r Ä'), min_size=1), max_size=6))
@settings(max_examples=50)
def test_any_text_comes_back_from_csv_as_it_was(tmp_path_factory, written):
    folder = tmp_path_factory.mktemp("csv")
    buffer = io.StringIO(newline="")
    csv.writer(buffer, quoting=csv.QUOTE_ALL).writerows([["text"], *([text] for text in written)])
    (folder / "a.csv").write_bytes(buffer.getvalue().encode())
    assert texts(folder, "a.csv") == written


def test_messages_are_kept_with_their_roles(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([{"chat": chat, "text": 3}]))
    (document,) = documents(tmp_path, "a.jsonl", messages="chat")
    assert document.content == tuple(chat)
    assert document.characters == len("hi") + len("hello")


@pytest.mark.parametrize("value", ["hi", [], ["hi"], [{"role": "user"}, "hi"], None, {"role": "user"}])
def test_what_is_no_list_of_messages_is_refused_with_its_line(tmp_path, value):
    good = [{"role": "user", "content": "hi"}]
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([{"chat": good}, {"chat": value}]))
    message = refusal(tmp_path, "a.jsonl", messages="chat")
    assert re.search(r"a\.jsonl, line 2: column 'chat' should hold a list of chat messages", message)


def test_messages_come_from_parquet_too(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    pq.write_table(pa.table({"chat": [chat]}), tmp_path / "a.parquet")
    assert documents(tmp_path, "a.parquet", messages="chat")[0].content == tuple(chat)


def test_files_come_as_named_and_each_glob_sorted(tmp_path):
    for name in ["z.txt", "b/10.txt", "b/2.txt", "b/c/1.txt", "b/x.jsonl"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x", encoding="utf-8")
    files = corpus_files(recipe_for(tmp_path, ["z.txt", "b/*.txt", "b/**/1.txt"]))
    assert [path.relative_to(tmp_path).as_posix() for path in files] == ["z.txt", "b/10.txt", "b/2.txt", "b/c/1.txt"]


def test_a_folder_that_a_glob_matches_is_passed_over(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "file.txt").write_text("x", encoding="utf-8")
    assert corpus_files(recipe_for(tmp_path, "*.txt")) == [tmp_path / "file.txt"]


def test_a_name_with_brackets_is_that_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("bracketed", encoding="utf-8")
    assert texts(tmp_path, "a[1].txt") == ["bracketed"]


def test_suffixes_count_in_either_case(tmp_path):
    (tmp_path / "A.TXT.GZ").write_bytes(gzip.compress(b"hello"))
    assert texts(tmp_path, "A.TXT.GZ") == ["hello"]


def test_files_of_several_formats_make_one_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "b.jsonl").write_bytes(as_jsonl([{"text": "two"}]))
    (tmp_path / "c.csv").write_bytes(as_csv([{"text": "three"}]))
    pq.write_table(pa.table({"text": ["four"]}), tmp_path / "d.parquet")
    assert texts(tmp_path, ["d.parquet", "a.txt", "b.jsonl", "c.csv"]) == ["four", "one", "two", "three"]


@pytest.mark.parametrize("limit", [1, 3, 4, 100])
def test_limit_keeps_the_first_documents_over_all_files(tmp_path, limit):
    (tmp_path / "a.txt").write_text("1\n2\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("3\n4\n", encoding="utf-8")
    assert texts(tmp_path, ["a.txt", "b.txt"], unit="line", limit=limit) == ["1", "2", "3", "4"][:limit]


def test_nothing_behind_the_limit_is_judged(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\nnot json\n')
    assert texts(tmp_path, "a.jsonl", limit=1) == ["a"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_local_folder_of_the_datasets_library_is_a_corpus(tmp_path, kind):
    folder = tmp_path / "set"
    folder.mkdir()
    if kind == "jsonl":
        (folder / "train.jsonl").write_bytes(as_jsonl(RECORDS))
    else:
        pq.write_table(pa.Table.from_pylist(RECORDS), folder / "train.parquet")
    found = documents(tmp_path, None, hub="set", columns=["label"], limit=3)
    assert [d.content for d in found] == TEXTS[:3]
    assert [d.columns["label"] for d in found] == ["l0", "l1", "l2"]
    assert found[1].origin == "set (train), row 2"


def test_a_split_that_a_data_set_lacks_is_refused(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(as_jsonl(RECORDS))
    assert "cannot load the data set 'set', split 'dev'" in refusal(tmp_path, None, hub="set", split="dev")


@pytest.mark.parametrize("broken", ['{"text": "b"', "{'text': 'b'}", "text", '{"text": "b"} {}', "[" * 100_000])
def test_bad_json_is_refused_with_its_line(tmp_path, broken):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n' + broken + "\n", encoding="utf-8")
    assert re.search(r"a\.jsonl, line 3: bad JSON", refusal(tmp_path, "a.jsonl"))


@pytest.mark.parametrize("line, kind", [("[1]", "list"), ('"b"', "str"), ("3", "int"), ("null", "NoneType")])
def test_a_line_that_is_no_object_is_refused_with_its_line(tmp_path, line, kind):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n", encoding="utf-8")
    message = refusal(tmp_path, "a.jsonl")
    assert re.search(rf"a\.jsonl, line 2: expected one JSON object a line, found {kind}", message)


@pytest.mark.parametrize("name, place", [("a.jsonl", "line 1"), ("a.csv", "line 2"), ("a.parquet", "")])
@pytest.mark.parametrize("wanted", [{"text": "body"}, {"columns": ["body"]}])
def test_an_absent_column_is_refused_with_those_that_are_there(tmp_path, name, place, wanted):
    record = {"text": "a", "label": "b"}
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([record]))
    (tmp_path / "a.csv").write_bytes(as_csv([record]))
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "a.parquet")
    message = refusal(tmp_path, name, **wanted)
    assert message.endswith("no column 'body'; found text, label")
    assert str(tmp_path / name) in message
    assert place in message


@pytest.mark.parametrize("value, kind", [(3, "int"), (None, "NoneType"), (["a"], "list"), (True, "bool")])
def test_text_of_another_type_is_refused_with_its_line(tmp_path, value, kind):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([{"text": "a"}, {"text": value}]))
    message = refusal(tmp_path, "a.jsonl")
    assert re.search(rf"a\.jsonl, line 2: column 'text' should hold text, found {kind}$", message)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz", "a.txt.zst"])
def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path, name):
    data = {"txt": b"fine\nsch\xf6n\n", "jsonl": b'{"text": "a"}\n{"text": "\xf6"}\n', "csv": b"text\n\xf6\n"}
    suffix = "." + name.split(".")[2] if name.count(".") == 2 else ""
    (tmp_path / name).write_bytes(compressed(data[name.split(".")[1]], suffix))
    assert re.search(rf"{re.escape(name)}, line 2: not UTF-8", refusal(tmp_path, name))


@pytest.mark.parametrize("row", ["b", "b,c,d", "b,c,"])
def test_a_csv_row_of_another_length_is_refused_with_its_line(tmp_path, row):
    (tmp_path / "a.csv").write_text(f"text,label\na,1\n{row}\n", encoding="utf-8")
    assert re.search(r"a\.csv, line 3: expected 2 fields, as in the header", refusal(tmp_path, "a.csv"))


def test_a_csv_line_is_counted_in_the_file_though_fields_have_lines(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"a\nb\nc",1\nd\n', encoding="utf-8")
    assert re.search(r"a\.csv, line 5: expected 2 fields", refusal(tmp_path, "a.csv"))


@pytest.mark.parametrize("data", [b'text\n"never closed\n', b'text\n"a"b\n'])
def test_bad_quotes_in_csv_are_refused(tmp_path, data):
    (tmp_path / "a.csv").write_bytes(data)
    assert re.search(r"a\.csv, line \d+: bad CSV", refusal(tmp_path, "a.csv"))


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no parquet at all, though long enough to be one"])
def test_what_is_no_parquet_is_refused(tmp_path, data):
    (tmp_path / "a.parquet").write_bytes(data)
    assert re.search(r"cannot read .*a\.parquet", refusal(tmp_path, "a.parquet"))


def test_a_truncated_parquet_is_refused(tmp_path):
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(100)]}), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[: len(data) // 2])
    assert re.search(r"cannot read .*a\.parquet", refusal(tmp_path, "a.parquet"))


def test_a_compressed_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    assert "parquet files are compressed inside" in refusal(tmp_path, "a.parquet.gz")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [0.5, 0.99])
def test_a_truncated_stream_is_refused_and_not_read_as_a_shorter_one(tmp_path, suffix, cut):
    data = compressed("".join(f"line {i * i}\n" for i in range(20_000)).encode(), suffix)
    (tmp_path / f"a.txt{suffix}").write_bytes(data[: int(cut * len(data))])
    assert re.search(rf"cannot read .*a\.txt{suffix}", refusal(tmp_path, f"a.txt{suffix}", unit="line"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_is_not_compressed_as_its_name_says_is_refused(tmp_path, suffix):
    (tmp_path / f"a.txt{suffix}").write_bytes(b"plain text")
    assert re.search(rf"cannot read .*a\.txt{suffix}", refusal(tmp_path, f"a.txt{suffix}"))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_streams_one_after_another_are_one(tmp_path, suffix):
    data = compressed(b"one\ntw", suffix) + compressed(b"o\nthree\n", suffix)
    (tmp_path / f"a.txt{suffix}").write_bytes(data)
    assert texts(tmp_path, f"a.txt{suffix}", unit="line") == ["one", "two", "three"]


@pytest.mark.parametrize("source", ["none.txt", "*.txt", "folder"])
def test_a_name_that_matches_no_file_is_refused_with_where_it_was_looked_for(tmp_path, source):
    (tmp_path / "folder").mkdir()
    message = refusal(tmp_path, source)
    assert message == f"corpus.source {source!r}: no file there (looked at {tmp_path / source})"


def test_one_name_that_matches_nothing_is_refused_beside_those_that_do(tmp_path):
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    assert "corpus.source 'b*.txt': no file there" in refusal(tmp_path, ["a.txt", "b*.txt"])


@pytest.mark.parametrize("name", ["a.json", "a", "a.gz", "a.txt.bz2", "a.txt.gz.gz", "a.tsv"])
def test_an_unknown_suffix_is_refused_with_those_that_are_read(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    message = refusal(tmp_path, name)
    assert f"{tmp_path / name}: cannot tell what this is" in message
    assert ".txt, .jsonl, .csv, .parquet" in message


@pytest.mark.parametrize("asked", [{"columns": ["label"]}, {"messages": "chat"}, {"read": {"answer": "label"}}])
def test_a_txt_file_has_no_columns(tmp_path, asked):
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    assert "a.txt is plain text and has no columns" in refusal(tmp_path, "a.txt", **asked)


@pytest.mark.parametrize("value, kind", [(["a"], "list"), ({"a": 1}, "dict")])
def test_a_kept_column_of_lists_or_objects_is_refused_with_its_line(tmp_path, value, kind):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([{"text": "a", "tags": "x"}, {"text": "b", "tags": value}]))
    message = refusal(tmp_path, "a.jsonl", columns=["tags"])
    assert re.search(rf"a\.jsonl, line 2: column 'tags' holds {kind}; kept columns are text, numbers", message)


@pytest.mark.parametrize("value", ["", "  ", None, 3, True])
def test_an_answer_that_is_empty_or_no_text_is_refused_with_its_line(tmp_path, value):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([{"text": "a", "label": "yes"}, {"text": "b", "label": value}]))
    message = refusal(tmp_path, "a.jsonl", read={"answer": "label"})
    assert re.search(r"a\.jsonl, line 2: the answer column 'label' should hold text", message)


def test_the_answer_is_a_kept_column(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl([{"text": "a", "label": "yes", "n": 3}]))
    assert dict(documents(tmp_path, "a.jsonl", read={"answer": "label"})[0].columns) == {"label": "yes"}


def test_the_content_digest_is_that_of_the_text_alone():
    here = Document("text", {"n": 1}, "a.txt, line 1")
    assert Document("text", {"n": 2, "m": None}, "b.txt, line 9").content_digest == here.content_digest
    assert Document("text ", {"n": 1}, "a.txt, line 1").content_digest != here.content_digest


def test_the_content_digest_of_messages_takes_roles_and_order():
    ask, tell = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    contents = [(ask, tell), (tell, ask), (ask,), (ask | {"role": "system"}, tell), (ask | {"content": "c"}, tell), "a"]
    assert len({Document(content, {}, "").content_digest for content in contents}) == len(contents)


def test_the_column_digest_takes_names_and_typed_values_but_no_order():
    columns = [{}, {"n": 1}, {"n": 1.0}, {"n": "1"}, {"n": True}, {"n": None}, {"m": 1}, {"n": 1, "m": 1}]
    assert len({Document("t", values, "").column_digest for values in columns}) == len(columns)
    assert Document("t", {"a": 1, "b": 2}, "").column_digest == Document("u", {"b": 2, "a": 1}, "x").column_digest


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_kept_numbers_that_are_not_finite_have_a_digest(number):
    finite = Document("t", {"x": 1e308}, "").column_digest
    assert Document("t", {"x": number}, "").column_digest == Document("t", {"x": number}, "").column_digest != finite


def test_documents_are_read_as_a_stream(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}\nnot json\n')
    found = read_documents(recipe_for(tmp_path, "a.jsonl"))
    assert [next(found).content, next(found).content] == ["a", "b"]
    with pytest.raises(RequestError, match="line 3"):
        next(found)
