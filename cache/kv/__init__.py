"""KV pools of the embedder: paged, and one that allocates nothing."""
