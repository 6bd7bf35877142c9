"""Names of cached rows: what makes two of them the same, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch

from epd.cache.types import MediaKey

FORMAT_VERSION = 1
"""Of the stored objects. Part of every namespace, so that objects of another format are not found."""

_NAMESPACE_BYTES = 16
_DIGEST_BYTES = 32


def namespace(*, model: str, weights: str, dtype: torch.dtype, preprocessing: str) -> str:
    """Fingerprint, in hex, of everything but the picture that decides the rows.

    model: its id. weights: revision or digest of the weights. dtype: of the rows. preprocessing:
    fingerprint of every setting that changes pixels.
    """
    fields = (str(FORMAT_VERSION), model, weights, str(dtype), preprocessing)
    return _framed_digest((field.encode() for field in fields), _NAMESPACE_BYTES)


def media_key(
    namespace: str,
    data: bytes | bytearray | memoryview,
    modality: str = "image",
    salt: str | None = None,
    preprocessing: str = "",
) -> MediaKey:
    """Key of the rows of `data`, the encoded bytes as received.

    Callers with different `salt` never share rows; no salt and an empty one differ as well. preprocessing:
    fingerprint of settings of this request alone that change pixels.
    Takes about 1 ms per MiB and lets other threads run meanwhile.
    """
    salting = b"" if salt is None else b"+" + salt.encode()
    own = (preprocessing.encode(),) if preprocessing else ()
    return MediaKey(namespace, _framed_digest((modality.encode(), salting, data, *own), _DIGEST_BYTES))


def _framed_digest(fields: Iterable[bytes | bytearray | memoryview], num_bytes: int) -> str:
    """BLAKE2b over the fields, each behind its length, so that no two lists of fields read alike."""
    hasher = blake2b(digest_size=num_bytes)
    for field in fields:
        view = memoryview(field)
        hasher.update(view.nbytes.to_bytes(8, "little"))
        hasher.update(view)
    return hasher.hexdigest()
