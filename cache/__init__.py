"""Embedding cache: keys, pages, pinned pool, controller, stores and KV pools."""
