"""Which stores a deployment gets, and that it loads no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.factory import make_store
from epd.cache.stores.shared_memory import SharedMemoryStore


def test_without_settings_there_is_no_store() -> None:
    """A replica may run on its pool alone."""
    assert make_store() is None


def test_shared_memory_alone_has_no_breaker() -> None:
    """It has no server that could be down."""
    store = make_store(shared_memory_name=f"test-{os.getpid()}", shared_memory_bytes=1 << 16)
    assert isinstance(store, SharedMemoryStore)
    store.register(torch.zeros(1, dtype=torch.uint8))
    store.close()
    assert not Path(f"/dev/shm/epd-test-{os.getpid()}").exists()


def test_shared_memory_lies_in_the_folder_that_was_named(tmp_path: Path) -> None:
    """Another folder than /dev/shm can be given, such as a volume that several pods share."""
    store = make_store(shared_memory_name="rows", shared_memory_bytes=1 << 16, shared_memory_parent=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["epd-rows"]
    assert store is not None
    store.close()
    assert not list(tmp_path.iterdir())


def test_memory_that_is_not_there_is_refused() -> None:
    """Before anything else is started."""
    with pytest.raises(ValueError, match="was asked for"):
        make_store(shared_memory_name=f"test-{os.getpid()}", shared_memory_bytes=1 << 60)


@pytest.mark.cluster
def test_a_master_that_is_not_there_is_an_error_and_leaves_no_memory() -> None:
    """The host's memory that was set up for it is given back."""
    name = f"test-{os.getpid()}"
    with pytest.raises(StoreUnavailable, match="cannot reach"):
        make_store(mooncake_master="127.0.0.1:9", shared_memory_name=name, shared_memory_bytes=1 << 16)
    assert not Path(f"/dev/shm/epd-{name}").exists()


def test_mooncake_is_not_imported_unless_it_is_used() -> None:
    """A replica without it needs neither the package nor its system libraries."""
    code = (
        "import sys, epd.cache.controller\n"
        "from epd.cache.stores.factory import make_store\n"
        "assert make_store() is None\n"
        "assert not [name for name in sys.modules if name.startswith('mooncake')]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
