"""Errors of the model room.

ValueError
├── CheckpointError   a checkpoint that cannot serve: missing files, missing or unexpected weights
└── InvalidItem       an item the caller got wrong: an unreadable picture, an empty item, ...
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """The checkpoint cannot be served; the message names the file, the setting or the weights."""


class InvalidItem(ValueError):
    """One item of a request is wrong; the message never holds the item's content."""
