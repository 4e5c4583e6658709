"""Tiny: a random model of every causal language model that transformers knows, small enough to build in a test.

A config is shrunk by the names of its fields (`SMALL`), to the bottom of its nested configs; `SPECIAL` holds what a
config's type needs besides. Weights are random wherever a family allows it, and every piece of arithmetic on the
logits (softcaps, scales, divisors) is far from 1. Knows nothing of lenspipe.
"""

import dataclasses
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, WIDTH, DEPTH, HEADS, KV_HEADS, HEAD, POSITIONS, MLP, EXPERTS, TOP = 97, 32, 4, 4, 2, 8, 64, 48, 4, 2
EPSILON = 0.1
TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


class NotBuildable(Exception):  # noqa: N818
    """A type that gives no causal language model of text alone; says why in one line."""


ROPE = {"rope_type": "default", "rope_theta": 1e4}
SLIDING = ["sliding_attention", "full_attention"] * 2

SMALL: dict[str, Any] = {
    name: value
    for names, value in [
        ("vocab_size decoder_vocab_size vocab_size_per_layer_input output_vocab_size unpadded_vocab_size", VOCAB),
        ("hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size lru_width", WIDTH),
        ("output_embedding_size word_embed_proj_dim attention_hidden_size out_hidden_size hidden_size_global", WIDTH),
        ("num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers", DEPTH),
        ("num_encoder_layers num_blocks", DEPTH),
        ("num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads", HEADS),
        ("attention_heads num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads", HEADS),
        ("num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups kv_n_heads", KV_HEADS),
        ("head_dim swa_head_dim d_head d_kv dim_head attention_head_size attention_head_dim kv_channels", HEAD),
        ("max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length", POSITIONS),
        ("max_source_positions max_target_positions rel_extent image_size crop_size", POSITIONS),
        ("intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dim_ff dff d_ff", MLP),
        ("d_inner feed_forward_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size", MLP),
        ("moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size", MLP // 2),
        ("expert_ffn_hidden_size moe_shared_expert_intermediate_size", MLP // 2),
        ("num_experts num_local_experts n_routed_experts moe_num_experts", EXPERTS),
        ("num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k", TOP),
        ("n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group", 1),
        ("first_k_dense_replace num_dense_layers moe_layer_start_index", 1),
        ("kv_lora_rank q_lora_rank o_lora_rank laurel_rank qk_nope_head_dim v_head_dim index_head_dim", HEAD),
        ("qk_rope_head_dim rotary_dim", HEAD // 2),
        ("adapter_in_dim adapter_input_size adapter_out_dim mlp_dim nemo_conv_channels", WIDTH),
        ("depthwise_separable_out_channel ext_pw_out_channel", WIDTH),
        ("index_n_heads", HEADS),
        ("num_kv_shared_layers max_window_layers", 2),
        ("use_sliding_window", True),
        ("index_topk", 8),
        ("sliding_window sliding_window_size attention_window_size window_size keep_window_size", 6),
        ("attention_chunk_size", 6),
        ("mamba_d_state state_size ssm_state_size", 8),
        ("mamba_d_head mamba_head_dim mamba_headdim linear_head_dim linear_key_head_dim linear_value_head_dim", HEAD),
        ("mamba_n_heads mamba_num_heads", 2 * WIDTH // HEAD),
        ("linear_num_heads linear_num_value_heads", HEADS),
        ("linear_num_key_heads mamba_dt_rank time_step_rank n_groups n_mamba_heads", 2),
        ("mamba_chunk_size chunk_size", 8),
        ("hidden_size_per_layer_input loop_gate_rank output_channels", HEAD),
        ("bos_token_id", 1),
        ("eos_token_id", 2),
        ("pad_token_id", 0),
        ("initializer_range init_std initializer_factor", 0.2),
        ("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon eps mixer_rms_eps", EPSILON),
        ("final_logit_softcapping logits_soft_cap output_logit_soft_cap", 3.0),
        ("logit_scale", 0.3),
        ("logits_scaling logits_mup_width_multiplier", 7.0),
        ("lm_head_multiplier", 0.4),
        ("residual_multiplier", 0.6),
        ("embedding_multiplier", 1.7),
        ("attention_multiplier", 0.3),
        ("is_decoder", True),
    ]
    for name in names.split()
}

# By the type of a config, nested ones too: what its names alone do not tell.
SPECIAL: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True},
    "bamba": {"attn_layer_indices": [2]},
    "blt": {"encoder_hash_byte_group_vocab": 50, "local_attention_window_len": 8},
    "cohere2_moe": {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "prefix_dense_intermediate_size": MLP},
    "cohere_compass_text": {
        "layer_types": SLIDING,
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_groups": 2,
    },
    "dots3_note_text": {
        **{f"swa_{name}": HEADS for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": HEAD for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim")},
        "swa_head_dim": 2 * HEAD,
        "swa_qk_nope_head_dim": 3 * HEAD // 2,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "electra": {"embedding_size": 20},
    "falcon_h1": {
        "mamba_d_ssm": 2 * WIDTH,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.2,
        "key_multiplier": 0.7,
        "mlp_multipliers": [0.8, 1.3],
        "ssm_multipliers": [0.8, 1.2, 0.9, 1.1, 0.7],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
    },
    "flint": {"mlp_only_layers": [0]},
    "got_ocr2_vision": {"global_attn_indexes": [1, 3], "window_size": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], DEPTH // 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_hidden_layers": DEPTH // 2, "L_cycles": 2, "embedding_scale": 2.0},
    "hyperclovax": {"logits_scaling": 3.0},
    "inkling_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "vocab_size": VOCAB + 7},
    "inkling2_text": {"n_layers_per_attn_res_block": 2, "vocab_size": VOCAB + 7},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "vocab_size": VOCAB + 7,
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "laguna": {"layer_types": SLIDING},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 2 * WIDTH // HEAD},
    "mellum": {"layer_types": SLIDING, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "minicpm3": {"dim_model_base": WIDTH // 2, "scale_emb": 3, "scale_depth": 1.4},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": HEAD,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 2,
    },
    "reformer": {
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [4, 16],
        "axial_pos_embds_dim": [8, 24],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
        "hash_seed": 5,
    },
    "rembert": {"input_embedding_size": 20, "output_embedding_size": 24},
    "roc_bert": {
        "shape_vocab_size": 50,
        "shape_embed_dim": HEAD,
        "pronunciation_vocab_size": 40,
        "pronunciation_embed_dim": HEAD,
    },
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"pad_token_id": None},  # loading zeroes the padding's row, which is tied to the unembedding
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}

AUDIO = "four codebooks of audio codes, and AutoModelForCausalLM hands its decoder class the composite config"
DRAFT = "a draft model: reads another model's embeddings, keys and values, never token ids"
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "its vision tower needs the timm package, which is not a dependency; gemma3n_text is its language model",
    "gemma4_assistant": DRAFT,
    "gemma4_unified_assistant": DRAFT,
    "musicgen": AUDIO,
    "musicgen_melody": AUDIO,
}

# Multiplies the unembedding of families whose divisor would leave logits too small to tell apart.
LOUDER = {
    **dict.fromkeys(["granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid"], 5.0),
    **dict.fromkeys(["granitemoeshared", "inkling_text"], 5.0),
}
# Decays and steps: their own start is where they are stable, so noise is added to it, however many their dimensions.
STARTED = re.compile(r"(^|\.)(A_log|dt_bias|time_decay|time_first)$")
# Buffers that a checkpoint brings and that start at 0 or 1.
BUFFERS = re.compile(r"(e_score_correction_bias|expert_bias|balancing_biases|layer_scalar)$")
# Sinusoids: parameters in name only, which no checkpoint holds.
COMPUTED = re.compile(r"embed_positions\.weight$")


def config(model_type: str) -> Any:
    """Make a type's tiny config."""
    if model_type in UNBUILDABLE:
        raise NotBuildable(UNBUILDABLE[model_type])
    with _silence():
        return _shrunk(hf.CONFIG_MAPPING[model_type], model_type)


def build(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> Any:
    """Build a type's tiny model with random weights, the same ones for the same seed."""
    settings = config(model_type)
    with _silence(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(settings).eval()
        _randomise(model, torch.Generator().manual_seed(seed))
        _cast(model, dtype)
        return model


def _shrunk(kind: type, model_type: str) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in SMALL.items() if name in names}
    if "kv_lora_rank" in names:  # latent attention: no groups of heads, and what is rotated is a part of its own
        values |= {"num_key_value_heads": HEADS, "head_dim": HEAD // 2}
    normal = kind()
    for name in ("layer_types", "layers_block_type", "indexer_types"):
        if name in names and getattr(normal, name):
            kinds = list(dict.fromkeys(getattr(normal, name)))
            values[name] = (kinds * DEPTH)[:DEPTH]
    if getattr(normal, "mlp_layer_types", None):
        kinds = list(dict.fromkeys(normal.mlp_layer_types))
        values["mlp_layer_types"] = (kinds + kinds[-1:] * DEPTH)[:DEPTH]
    for name in kind.sub_configs:
        if isinstance(inner := getattr(normal, name, None), hf.PreTrainedConfig):
            values[name] = _shrunk(type(inner), inner.model_type)
    return kind(**{name: value for name, value in values.items() if name in names} | SPECIAL.get(model_type, {}))


def _randomise(model: Any, generator: torch.Generator) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or (not parameter.requires_grad and COMPUTED.search(name)):
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2 or STARTED.search(name):
                parameter.add_(0.5 * noise)
            else:
                parameter.copy_(0.3 * noise)
        for name, buffer in model.named_buffers():
            if BUFFERS.search(name):
                buffer.add_(0.5 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith(".tid2eid"):  # DeepSeek-V4's table of each token's experts
                buffer.copy_(torch.rand(len(buffer), EXPERTS, generator=generator).argsort(1)[:, : buffer.shape[1]])
        if louder := LOUDER.get(model.config.model_type):
            model.get_output_embeddings().weight.mul_(louder)


def _cast(model: Any, dtype: torch.dtype) -> None:
    if dtype == torch.float64:  # the grouped kernel of experts knows no such numbers
        model.set_experts_implementation("eager")
    # Not `Module.to`: a checkpoint opened in a half type leaves some modules of some families in float32.
    wide = {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        wide |= {*(model._keep_in_fp32_modules or ())}
    kept = re.compile("|".join(rf"(^|\.){re.escape(name)}(\.|$)" for name in wide) or "(?!)")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and (dtype == torch.float64 or not kept.search(name)):
            tensor.data = tensor.data.to(dtype)


@contextmanager
def _silence() -> Iterator[None]:
    verbosity, level = hf.logging.get_verbosity(), logging.root.manager.disable
    hf.logging.set_verbosity(hf.logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf.logging.set_verbosity(verbosity)
        logging.disable(level)
