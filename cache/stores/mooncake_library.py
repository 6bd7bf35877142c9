"""Mooncake, imported when it is first needed, with its defaults made fit for a server."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

from epd.cache.errors import StoreUnavailable

DEBIAN_PACKAGES = "libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"

_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}


def import_store() -> ModuleType:
    """`mooncake.store`. Raises StoreUnavailable, saying what to install, when it cannot be loaded.

    Sets MC_LOG_LEVEL, MC_RPC_TIMEOUT_MS and MC_STORE_CLIENT_SETUP_RETRIES, which the library reads as it is
    loaded, unless they are set.
    """
    _set_environment()
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise StoreUnavailable("Mooncake is not installed: pip install 'epd[cpu]' or 'epd[cuda]'") from error
    except ImportError as error:
        raise StoreUnavailable(missing_library(str(error))) from error


def master_path() -> Path:
    """The program `mooncake_master` beside the package. Raises StoreUnavailable when there is none."""
    _set_environment()
    try:
        package = importlib.import_module("mooncake")
    except ImportError as error:
        raise StoreUnavailable("Mooncake is not installed: pip install 'epd[cpu]' or 'epd[cuda]'") from error
    for folder in package.__path__:
        path = Path(folder) / "mooncake_master"
        if path.is_file():
            return path
    raise StoreUnavailable(f"the installed mooncake ({list(package.__path__)}) has no mooncake_master")


def _set_environment() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def missing_library(reason: str) -> str:
    """What to tell of a loader's error `reason`."""
    return (
        f"Mooncake cannot be loaded: {reason.strip()}. "
        f"On Debian and Ubuntu: apt-get install {DEBIAN_PACKAGES}"
    )
