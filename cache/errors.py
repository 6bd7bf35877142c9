"""Errors of the cache room.

ValueError
└── RequestTooLarge     one request needs more pages than the pool has
TimeoutError
└── PoolBusy            the pool had no room for the request in time: try again later
RuntimeError
├── CacheClosed         the cache is closed, or closed while the call waited
└── StoreUnavailable    a store cannot be started or reached at start-up; the message says what to do
"""

from __future__ import annotations


class RequestTooLarge(ValueError):
    """One request needs more pages than the whole pool has. Refused before any work."""

    def __init__(self, needed_pages: int, num_pages: int, page_tokens: int) -> None:
        super().__init__(
            f"the request's media need {needed_pages} pages of {page_tokens} tokens, the pool has {num_pages}"
        )
        self.needed_pages = needed_pages
        self.num_pages = num_pages


class PoolBusy(TimeoutError):
    """The pool had no room for the request within the deadline: other requests hold its pages."""


class CacheClosed(RuntimeError):
    """The cache is closed, or closed while the call waited."""


class StoreUnavailable(RuntimeError):
    """A store cannot be started or reached. Raised at start-up only: a running cache lives without."""
