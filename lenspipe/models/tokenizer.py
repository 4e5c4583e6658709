"""Tokenizer: text to token ids and back, as the checkpoint's own does it, with the rule for BOS made plain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lenspipe.errors import ModelError, RequestError

CHAT_DATE = "2024-07-26"
"""What chat templates that write today's date are told it is, so that a text has the same tokens on any day.

Llama 3's templates name this day themselves where they are told none.
"""


def timeless(template: str) -> str:
    """Tell a chat template that it is CHAT_DATE: in jinja itself, as its sandbox is given no function from outside."""
    if "strftime_now" not in template:
        return template
    day = datetime.fromisoformat(CHAT_DATE)
    spelled = "".join(f".replace('%{c}', '{day.strftime(f'%{c}')}')" for c in "aAbBcdHIjmMpSUwWxXyY")
    unpadded = "".join(f".replace('%-{c}', '{int(day.strftime(f'%{c}'))}')" for c in "dHIjmMS")
    return f"{{% macro strftime_now(format) %}}{{{{ format{spelled}{unpadded} }}}}{{% endmacro %}}\n{template}"


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        hf: the transformers tokenizer.
    """

    hf: Any

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that the tokenizer declares special."""
        return frozenset(self.hf.all_special_ids)

    def encode(self, content: str | Sequence[Mapping[str, Any]], bos: str, origin: str) -> tuple[list[int], int]:
        """Turn one document into ids.

        Args:
            content: text, or chat messages for the chat template.
            bos: auto (as the tokenizer does), always, or never.
            origin: of the document, for messages.

        Returns:
            The ids, and 1 if they begin with BOS, else 0.

        Raises:
            RequestError: no tokens, a doubled BOS, no BOS to add, or no chat template.
        """
        bos_id = self.hf.bos_token_id
        if bos == "always" and bos_id is None:
            raise RequestError('corpus.bos = "always", but this tokenizer has no BOS token: use "auto" or "never"')
        if isinstance(content, str):
            plain = list(self.hf(content, add_special_tokens=False, verbose=False)["input_ids"])
            if not plain:
                raise RequestError(f"{origin}: tokenizes to nothing; remove the document")
            ids = plain if bos == "never" else list(self.hf(content, verbose=False)["input_ids"])
        else:
            ids = self._chat(content, origin)
            if bos == "never" and ids[:1] == [bos_id]:
                ids = ids[1:]
        if bos == "always" and ids[0] != bos_id:
            ids = [bos_id, *ids]
        if bos_id is not None and ids[:2] == [bos_id, bos_id]:
            also = "" if bos == "never" else ', or set corpus.bos = "never"'
            raise RequestError(
                f"{origin}: begins with two BOS tokens ({self.hf.bos_token!r}); the text has one of its own: "
                f"remove it from the text{also}"
            )
        return ids, int(bos_id is not None and ids[0] == bos_id)

    def _chat(self, messages: Sequence[Mapping[str, Any]], origin: str) -> list[int]:
        if not self.hf.chat_template:
            raise RequestError("corpus.messages needs a chat template, and this tokenizer has none: use corpus.text")
        try:
            template = timeless(self.hf.get_chat_template())
            ids = self.hf.apply_chat_template(
                [dict(item) for item in messages], chat_template=template, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates are programs and raise what they like
            raise RequestError(f"{origin}: the chat template refuses these messages: {error}") from None
        if not ids:
            raise RequestError(f"{origin}: tokenizes to nothing; remove the document")
        return list(ids)

    def pieces(self, text: str) -> list[int]:
        """Tokenize a fragment, with no special tokens."""
        return list(self.hf(text, add_special_tokens=False, verbose=False)["input_ids"])

    def answer(self, text: str, prefix: str) -> tuple[int, int]:
        """Tokenize an answer as it would follow a prompt: its first id, and how many ids it has."""
        ids = self.pieces(text if text[:1].isspace() else prefix + text)
        return ids[0], len(ids)

    def single(self, token: str | int, vocab_size: int) -> int:
        """Find the id of a token that is named by its id or its string.

        Raises:
            RequestError: an id outside the vocabulary, or a string that is not exactly one token or is unknown.
        """
        if isinstance(token, int):
            if not 0 <= token < vocab_size:
                raise RequestError(f"token id {token}: the vocabulary has ids 0 to {vocab_size - 1}")
            return token
        ids = self.pieces(token)
        if len(ids) != 1:
            names = ", ".join(f"{self.hf.decode([i])!r} ({i})" for i in ids) or "nothing"
            hint = (
                "" if token.startswith(" ") or len(self.pieces(" " + token)) != 1 else f" {' ' + token!r} is one token."
            )
            raise RequestError(f"token {token!r} is {len(ids)} tokens: {names}; name one of them.{hint}")
        if ids[0] == self.hf.unk_token_id and token != self.hf.unk_token:
            raise RequestError(f"token {token!r} is unknown to this tokenizer, which reads it as {self.hf.unk_token!r}")
        return ids[0]

    def strings(self, vocab_size: int) -> list[str]:
        """Decode every id alone; ids that the tokenizer does not have are empty strings."""
        known = min(max(self.hf.get_vocab().values(), default=-1) + 1, vocab_size)
        decoded = self.hf.batch_decode([[i] for i in range(known)], clean_up_tokenization_spaces=False)
        return [*decoded, *[""] * (vocab_size - known)]


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    """Load a checkpoint's tokenizer.

    Raises:
        ModelError: transformers cannot load it.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 -- imports torch

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code))
    except Exception as error:  # transformers raises many kinds
        raise ModelError(f"cannot load the tokenizer in {folder}: {error}") from error
