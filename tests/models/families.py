"""Tiny random models of the families that must pass the gate: norms, biases and epsilon away from 1, 0 and 1e-6."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf

from lenspipe.models.facts import ModelFacts

VOCAB, WIDTH, DEPTH = 97, 32, 3
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA: dict[str, Any] = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
RMS: dict[str, Any] = LLAMA | {"rms_norm_eps": 0.5}

CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**RMS),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=DEPTH, n_head=4, n_positions=64, layer_norm_epsilon=0.5,
        bos_token_id=1, eos_token_id=2,
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(
        **COMMON, intermediate_size=48, max_position_embeddings=64, layer_norm_eps=0.5
    ),
    "gemma2": lambda: hf.Gemma2Config(**RMS, head_dim=8, final_logit_softcapping=3.0, sliding_window=4),
    "cohere": lambda: hf.CohereConfig(**LLAMA, logit_scale=0.0625, layer_norm_eps=0.5),
    "granite": lambda: hf.GraniteConfig(**RMS, logits_scaling=7.0),
    "qwen3": lambda: hf.Qwen3Config(**RMS, head_dim=8),
    "opt": lambda: hf.OPTConfig(**COMMON, ffn_dim=48, max_position_embeddings=64),
    "opt_projected": lambda: hf.OPTConfig(**COMMON, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=20),
    "opt_post_norm": lambda: hf.OPTConfig(
        **COMMON, ffn_dim=48, max_position_embeddings=64, do_layer_norm_before=False
    ),
    "phi": lambda: hf.PhiConfig(**COMMON, intermediate_size=48, max_position_embeddings=64, layer_norm_eps=0.5),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, n_layer=DEPTH, n_head=4, layer_norm_epsilon=0.5,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
}  # fmt: skip


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build one family's tiny random model."""
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.randn_like(parameter))
            else:
                parameter.mul_(5.0)
    return model.to(dtype)


def facts(name: str = "tiny", dtype: str = "float32", depth: int = DEPTH) -> ModelFacts:
    """What would be known of such a model's checkpoint."""
    return ModelFacts(name, Path("nowhere"), depth, WIDTH, VOCAB, 64, dtype, "", "")
