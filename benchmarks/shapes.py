"""Shapes of published models, for random weights."""

from __future__ import annotations

# Qwen3-Embedding-0.6B, by its config.json.
SHAPE_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
