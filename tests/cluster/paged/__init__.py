"""Tests that share one server with paged KV memory, and shared memory of the host before Mooncake."""
