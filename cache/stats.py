"""Counters of one cache. Their names are public: metrics and dashboards use them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """All grow only. Keys are counted once per request, however often the request names them."""

    hits_local: int = 0
    """Keys that were in the pool."""
    hits_joined: int = 0
    """Keys that somebody else was filling or fetching; the request waited for it."""
    hits_host: int = 0
    """Keys read from shared memory of the host."""
    hits_store: int = 0
    """Keys read from the far store."""
    misses: int = 0
    """Keys that the request was told to have made (missing or a ticket)."""
    fills: int = 0
    """Entries filled from rows that were given."""
    fill_bytes: int = 0
    abandoned: int = 0
    """Tickets that were given back, lost, or whose fill failed."""
    evictions: int = 0
    evicted_bytes: int = 0
    pool_waits: int = 0
    """Requests that waited for pages."""
    pool_timeouts: int = 0
    """Requests that waited in vain."""
    get_keys: int = 0
    """Keys asked of the store."""
    get_bytes: int = 0
    """Bytes of hits, headers not counted."""
    get_failures: int = 0
    """Keys that the store failed to answer for."""
    get_timeouts: int = 0
    """Keys whose answer took longer than the deadline."""
    get_skipped: int = 0
    """Keys not asked: the breaker is open or the queue full."""
    integrity_failures: int = 0
    """Objects read that were not what their key promises: wrong size, header or checksum."""
    put_keys: int = 0
    """Keys given to the store."""
    put_bytes: int = 0
    """Bytes of those stored, headers not counted."""
    put_failures: int = 0
    """Keys that the store failed to take, had no room for, or that another was putting."""
    put_timeouts: int = 0
    put_dropped: int = 0
    """Keys not put: the queue was full or the breaker is open."""


# Besides these, `EmbeddingCache.stats()` has the levels of this moment:
#   pages, pages_free, pages_draining    of the pool
#   entries, pins, filling, waiting      entries; live handles; entries being filled; requests in line
#   puts_running                         puts queued or running
#   calls_hung                           store calls that were given up and still run
#   breaker_state                        0 closed, 1 open, 2 half-open; only with a guarded store
# and the store's own: host_evictions, host_full, mooncake_rebuilds, mooncake_crowded.
