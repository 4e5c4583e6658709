"""Errors: what lenspipe raises when it will not go on.

Each message says what was asked, what was expected, what was found, and what to do.
The command line turns a RequestError into exit status 2 and every other LenspipeError into 1.
"""

import re

_SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)|hf_[A-Za-z0-9]{20,}")


def redacted(text: str) -> str:
    """Take out what may be a secret: credentials in a URL, tokens of the hub."""
    return _SECRET.sub("***", text)


class LenspipeError(Exception):
    """Base of all errors that lenspipe raises on purpose; its message holds no secrets."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(message))


class RequestError(LenspipeError):
    """The request was wrong: nothing was computed, and the same request can never succeed."""


class ModelError(LenspipeError):
    """The model cannot be read as a causal language model with one residual stream."""


class UnconvertedError(ModelError):
    """A GGUF file that has not been converted to safetensors yet."""


class GateError(ModelError):
    """Unembed(last state) is not the model's own logits: every readout would be wrong."""


class NonFiniteError(LenspipeError):
    """The model produced NaN or infinity at a site."""


class StoreError(LenspipeError):
    """The artifact store cannot be read or written."""


class DamagedArtifactError(StoreError):
    """A finished artifact is no longer what its manifest says; it has been set aside."""
