"""Small sizes for every causal language model of transformers, by the name of the configuration's attribute.

``SIZES`` gives a value to each attribute that a configuration happens to have; ``EXTRA`` holds what one architecture
needs besides (lists of one entry per layer, products that must agree). Sub-configurations are treated alike.
"""

from __future__ import annotations

import re
from itertools import cycle, islice
from typing import Any

VOCABULARY = 97

SIZES: dict[str, Any] = {
    # vocabulary
    "vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "type_vocab_size": 2,
    "hidden_size_global": 32,
    "encoder_hash_byte_group_vocab": VOCABULARY,
    "num_codebooks": 1,
    "adapter_in_dim": 32,
    "adapter_out_dim": 32,
    "adapter_input_size": 32,
    # width
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "embedding_dim": 32,
    "input_embedding_size": 32,
    "output_embedding_size": 32,
    "word_embed_proj_dim": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "d_inner": 48,
    "dff": 48,
    "dim_ff": 48,
    "feed_forward_size": 48,
    # depth
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "num_decoder_layers": 2,
    "num_encoder_layers": 1,
    "num_blocks": 2,
    "num_nextn_predict_layers": 0,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "kv_n_heads": 2,
    "head_dim": 8,
    "dim_head": 8,
    "d_head": 8,
    "kv_channels": 8,
    "attention_head_size": 8,
    "rotary_dim": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    # latent attention: keys wider than values
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 12,
    "v_head_dim": 6,
    "query_pre_attn_scalar": 8,
    # positions, windows and chunks that really cut a row of 32 columns
    "max_position_embeddings": 64,
    "max_target_positions": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "context_length": 64,
    "model_max_length": 64,
    "sliding_window": 9,
    "sliding_window_size": 9,
    "window_size": 9,
    "attention_window_size": 9,
    "local_attention": 16,
    "attention_chunk_size": 8,
    "no_rope_layer_interval": 2,
    "floor_scale": 8,
    "index_topk": 6,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 2,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "short_conv_kernel_size": 3,
    "conv_kernel_size": 3,
    "conv_kernel": 4,
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_d_ssm": 64,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "n_groups": 1,
    "block_size": 8,
    "lru_width": 32,
    "attention_hidden_size": 32,
    "attention_head_dim": 8,
    # what a random model needs to be sensitive
    "initializer_range": 0.2,
    "init_std": 0.2,
    "embed_init_std": 0.2,
    "embedding_initializer_range": 0.2,
    "output_router_logits": False,
    "use_cache": False,
    "pretraining_tp": 1,
}

#: Attributes that are used although their default is None (other attributes whose default is None stay so).
_USED_BY_DEFAULT = {"num_key_value_heads", "pad_token_id", "bos_token_id", "eos_token_id", "head_dim"}
_DROPOUT = re.compile(r"dropout|pdrop|layerdrop|drop_rate|drop_path|jitter|mask_time_prob|mask_feature_prob")

_LATENT = {"num_key_value_heads": 4, "head_dim": 4}
_DECODER = {"is_decoder": True}
#: Causal only when told so.
_BERT_LIKE = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
)

EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_BERT_LIKE, _DECODER),
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_qk_rope_head_dim": 4,
        "swa_v_head_dim": 6,
        "sliding_window": 9,
        "shared_experts_intermediate_size": 16,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mpt": {},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 4,
    },
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [4, 8],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 2,
    },
    "roc_bert": {
        **_DECODER,
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 97,
        "shape_embed_dim": 16,
        "shape_vocab_size": 97,
    },
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def overrides(name: str, defaults: dict[str, Any], *, subs: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments for the configuration ``name`` with default attributes ``defaults`` and sub-configurations ``subs``."""
    chosen: dict[str, Any] = {}
    for attribute, default in defaults.items():
        if attribute in subs:
            continue
        if attribute in SIZES and (default is not None or attribute in _USED_BY_DEFAULT):
            chosen[attribute] = SIZES[attribute]
        elif _DROPOUT.search(attribute) and isinstance(default, int | float) and not isinstance(default, bool):
            chosen[attribute] = type(default)(0)
    if "kv_lora_rank" in defaults:  # latent attention has no grouped heads, and its rotary part is a head of its own
        chosen.update({key: value for key, value in _LATENT.items() if key in defaults})
    chosen.update(_layers(defaults))
    chosen.update(EXTRA.get(name, {}))
    return chosen


def _layers(defaults: dict[str, Any]) -> dict[str, Any]:
    """One layer of each type that the default configuration has."""
    kinds = {
        attribute: list(dict.fromkeys(defaults[attribute]))
        for attribute in ("layer_types", "mlp_layer_types", "layers_block_type")
        if isinstance(defaults.get(attribute), list) and defaults[attribute]
    }
    if not kinds:
        return {}
    count = max(2, *map(len, kinds.values()))
    return {attribute: list(islice(cycle(found), count)) for attribute, found in kinds.items()} | {
        "num_hidden_layers": count
    }
