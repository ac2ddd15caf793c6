"""The `config.json` of real models, as constants, so that arithmetic needs no download.

Generated from notebooks/13e_commands.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 128001,
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
LLAMA_3_2_1B: dict[str, Any] = LLAMA_3_1_8B | {
    "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": LLAMA_3_1_8B["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip

QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "eos_token_id": 151645,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
QWEN2_5_7B: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3_0_6B: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_hidden_layers": 28, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_14B: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40,
    "num_hidden_layers": 40,
}  # fmt: skip
QWEN3_32B: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
    "num_hidden_layers": 64,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4,
}  # fmt: skip

KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B,
    "meta-llama/Llama-3.2-1B": LLAMA_3_2_1B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_5_7B,
    "Qwen/Qwen3-0.6B": QWEN3_0_6B,
    "Qwen/Qwen3-8B": QWEN3_8B,
    "Qwen/Qwen3-14B": QWEN3_14B,
    "Qwen/Qwen3-32B": QWEN3_32B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
}
