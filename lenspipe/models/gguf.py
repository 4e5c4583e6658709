"""GGUF: a quantised checkpoint in one file, dequantised once into a safetensors folder.

Dequantising takes half a minute at each start; the folder opens in a second and holds the same float32 numbers.
"""

import io
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from lenspipe.errors import ModelError
from lenspipe.models.facts import gguf_folder


def convert(path: Path, say: Callable[[str], None] = lambda _: None) -> Path:
    """Convert a GGUF file, unless that was done before, and return the checkpoint folder.

    Raises:
        ModelError: transformers cannot read the file.
    """
    folder = gguf_folder(path)
    if (folder / "config.json").is_file():
        return folder
    say(f"converting {path.name} to safetensors, once, under {folder.parent}")
    import torch  # noqa: PLC0415 -- planning imports this module and not torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging  # noqa: PLC0415

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix="draft-"))
    try:
        with redirect_stderr(io.StringIO()):  # a progress bar that nothing else turns off
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype="float32")
        if packed := [name for name, weight in model.state_dict().items() if weight.dtype != torch.float32]:
            raise ModelError(
                f"{packed[0]} was not dequantised: uninstall the package kernels, which keeps weights packed"
            )
        # The weights are plain float32 now; a model that still says "quantised" would neither save nor load.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        draft.rename(folder)
    except Exception as error:  # transformers raises many kinds for a file it cannot read
        shutil.rmtree(draft, ignore_errors=True)
        if (folder / "config.json").is_file():  # another process was quicker
            return folder
        raise ModelError(f"cannot read {path} as a GGUF model: {error}") from error
    return folder
