"""Packed attention: the skip-KV path, the paged path, and the guards between them."""
