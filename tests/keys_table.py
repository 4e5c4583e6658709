"""Keys table: every field of a recipe and every fact of the environment, and which stages' keys it enters.

`markdown()` is the table of docs/keys.md; tests/test_keys_table.py changes each and compares the keys.
"""

from dataclasses import dataclass
from typing import Any

STAGES = ("encode", "capture", "read", "assemble")
NONE, ALL = "", "encode capture read assemble"
FROM_CAPTURE, FROM_READ = "capture read assemble", "read assemble"


@dataclass(frozen=True)
class Field:
    """One field or fact.

    Attributes:
        enters: the stages whose keys it enters, directly or by what they rest on.
        why: in a clause.
        to: for a field, what the test changes it to; None where it cannot be changed alone.
    """

    enters: str
    why: str
    to: Any = None


FIELDS: dict[str, Field] = {
    "model.source": Field(NONE, "a model is known by its files' digests, wherever they lie", "MOVED"),
    "model.revision": Field(NONE, "names a hub's files, whose digests enter"),
    "model.dtype": Field(FROM_CAPTURE, "what the model computes in", "bfloat16"),
    "model.attention": Field(FROM_CAPTURE, "another implementation rounds otherwise", "eager"),
    "model.trust_remote_code": Field(NONE, "a permission; the code itself is among the model's files", True),
    "model.parts.blocks": Field(FROM_CAPTURE, "where states are taken", "model.layers"),
    "model.parts.chain": Field(FROM_CAPTURE, "what lies between state and logits", ["model.norm"]),
    "model.parts.head": Field(FROM_CAPTURE, "which unembedding", "lm_head"),
    "model.parts.multiply": Field(FROM_CAPTURE, "the logits' arithmetic", 2.0),
    "model.parts.divide": Field(FROM_CAPTURE, "the logits' arithmetic", 2.0),
    "model.parts.softcap": Field(FROM_CAPTURE, "the logits' arithmetic", 2.0),
    "corpus.source": Field(NONE, "documents are known by their contents, whatever file they are in", "MOVED"),
    "corpus.hub": Field(NONE, "as corpus.source"),
    "corpus.hub_config": Field(NONE, "as corpus.source"),
    "corpus.split": Field(NONE, "as corpus.source", "test"),
    "corpus.revision": Field(NONE, "as corpus.source", "main"),
    "corpus.unit": Field(NONE, "as corpus.source: what documents result", "line"),
    "corpus.text": Field(NONE, "as corpus.source: what documents result", "TEXT"),
    "corpus.messages": Field(ALL, "chats go through the tokenizer's template"),
    "corpus.columns": Field("encode assemble", "kept beside the tokens and in the dataset", ["category"]),
    "corpus.limit": Field(ALL, "other documents, in the shards that it changes", 5),
    "corpus.max_length": Field(ALL, "where sequences end", 50),
    "corpus.overflow": Field(ALL, "what becomes of long documents", "truncate"),
    "corpus.stride": Field(ALL, "what context a window has", 30),
    "corpus.bos": Field(ALL, "the first token", "never"),
    "capture.sites": Field("assemble", "other cells; those of the same state stay", ["resid_pre"]),
    "capture.layers": Field("assemble", "other cells; those of the same state stay", [1, 2]),
    "capture.positions": Field(FROM_CAPTURE, "which rows a cell has", "last"),
    "capture.residuals": Field(NONE, "stored or streamed, the numbers are the same", "stream"),
    "capture.nonfinite": Field(FROM_CAPTURE, "a cell that may hold NaN is not one that was refused them", "keep"),
    "read.lens": Field(FROM_READ, "what is read", ["LENS"]),
    "read.uncovered": Field(NONE, "enters only beside a trained lens", "logit"),
    "read.precision": Field(FROM_READ, "what the normed state is rounded to", "float32"),
    "read.measures": Field(FROM_READ, "what is computed", ["entropy"]),
    "read.top_k": Field(FROM_READ, "how many logits are kept", 3),
    "read.tracked": Field(FROM_READ, "which tokens are followed", [5]),
    "read.token_sets": Field(FROM_READ, "the contents of the file, not its name", "SETS"),
    "read.answer": Field("encode read assemble", "the answers are tokenized beside the texts", "answer"),
    "read.answer_prefix": Field(NONE, "enters only beside read.answer", "-"),
    "run.store": Field(NONE, "where", "STORE"),
    "run.shard_size": Field(NONE, "a corpus that was cut stays as it was cut; it decides the first cut", 9_000),
    "run.batch_tokens": Field(NONE, "changes last bits only, within the tests' 1e-4", 17),
    "run.max_bytes": Field(NONE, "a refusal", 2**40),
    "run.memory": Field(NONE, "how, not what", 2**28),
    "run.device": Field(NONE, "changes last bits only; the kernel stands in the manifest", "cpu"),
    "run.runner": Field(NONE, "how, not what", "dask"),
    "run.workers": Field(NONE, "how, not what", 2),
    "run.address": Field(NONE, "where", "tcp://127.0.0.1:1"),
    "run.api": Field(NONE, "where", "http://127.0.0.1:1/api"),
}

FACTS: dict[str, Field] = {
    "the bytes of the weights": Field(FROM_CAPTURE, "SHA-256 of every weight file"),
    "the model's config": Field(FROM_CAPTURE, "all of it but who wrote it with which version"),
    "the tokenizer's files": Field(ALL, "they decide the ids, and the vocabulary table"),
    "a document's text": Field(ALL, "in its shard"),
    "the order of the documents": Field(ALL, "in the shards that it changes"),
    "a kept value": Field("encode assemble", "in its shard"),
    "an answer": Field("encode read assemble", "in its shard"),
    "the bytes of a lens's numbers": Field(FROM_READ, "of the cells read with it"),
    "the contents of the token sets": Field(FROM_READ, "names and tokens, not spelling"),
    "the version of a stage's numbers": Field(ALL, "of that stage and all that rest on it"),
    "versions of torch, transformers, numpy ...": Field(
        NONE, "recorded; a run that they make compute otherwise is refused"
    ),
    "the processor and the number of threads": Field(NONE, "changes last bits only, or none; the kernel is recorded"),
    "names, places and times of files": Field(NONE, "what counts is what they hold"),
}


def markdown() -> str:
    """The table of docs/keys.md."""
    lines = [f"| what | {' | '.join(STAGES)} | why |", "|---|---|---|---|---|---|"]
    for name, field in {**{f"`{name}`": field for name, field in FIELDS.items()}, **FACTS}.items():
        marks = ("yes" if stage in field.enters.split() else "" for stage in STAGES)
        lines.append(f"| {name} | {' | '.join(marks)} | {field.why} |")
    return "\n".join(lines)
