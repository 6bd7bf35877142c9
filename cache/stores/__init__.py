"""Stores behind the embedding cache, one file per backend."""
