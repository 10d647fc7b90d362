"""Tiny transformers configurations as a config.json holds them: the defaults of each family (dropout too), only smaller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 4, "n_embd": 32, "n_head": 2, "n_positions": 16,
        "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0,
    },
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "vocab_size": 64, "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "qwen2": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "vocab_size": 64, "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_hidden_layers": 4, "hidden_size": 32, "sliding_window": 4096,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "vocab_size": 64,
    },
    "bert": {
        "model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "max_position_embeddings": 16, "vocab_size": 64,
    },
    "roberta": {
        "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "num_hidden_layers": 4, "hidden_size": 32,
        "intermediate_size": 64, "num_attention_heads": 2, "max_position_embeddings": 18, "vocab_size": 64,
    },
    "t5": {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 3, "d_model": 32, "d_kv": 8, "d_ff": 64,
        "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0,
    },
    "vit": {
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 4, "hidden_size": 32,
        "intermediate_size": 64, "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "num_labels": 4,
    },
    "mixtral": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 3, "hidden_size": 32,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 16, "vocab_size": 64,
    },
    "whisper": {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "encoder_layers": 2, "decoder_layers": 2,
        "d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16, "vocab_size": 64, "pad_token_id": 1,
        "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2,
    },
    "llava": {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 63,
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
            "max_position_embeddings": 24, "vocab_size": 64,
        },
        "vision_config": {
            "model_type": "clip_vision_model", "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 32,
        },
    },
    "clip": {
        "model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 16,
        "text_config": {
            "model_type": "clip_text_model", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
            "max_position_embeddings": 16, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
        },
        "vision_config": {
            "model_type": "clip_vision_model", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
            "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
        },
    },
    "wav2vec2": {
        "model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"], "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "vocab_size": 32, "layerdrop": 0.0, "apply_spec_augment": False, "conv_dim": [8, 8],
        "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
}  # fmt: skip


def write_config(folder: Path, family: str, name: str = "config.json", **changes: Any) -> str:
    """Write a tiny configuration with some values changed (None removes a key); returns the path."""
    values = {key: value for key, value in {**CONFIGS[family], **changes}.items() if value is not None}
    path = folder / name
    path.write_text(json.dumps(values))
    return str(path)
