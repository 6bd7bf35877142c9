"""What can be known to be wrong with a Serve config file before Ray starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.mooncake_server import check_free
from epd.deployments.settings import Settings

_BUILDER = "epd.deployments.app:build"
_HTTP = {"host": "127.0.0.1", "port": 8000}  # Serve's own defaults


def problems(path: Path, *, starts_ray: bool) -> list[str]:
    """One line for each: no YAML, settings that are not taken, ports in use.

    starts_ray: the service gets a Ray of its own, so that nobody may listen on its ports yet.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return [f"{path} cannot be read: {' '.join(str(error).split())}"]
    if not isinstance(config, dict) or not isinstance(config.get("applications"), list):
        return [f"{path} is no Serve config file: it has no list of `applications`"]
    applications = [each for each in config["applications"] if isinstance(each, dict)]
    ours = [each for each in applications if each.get("import_path") == _BUILDER]
    found, settings = [], []
    for application in ours:
        try:
            settings.append(Settings.model_validate(application.get("args") or {}))
        except ValidationError as error:
            found += [f"{path}: {_where(each['loc'])}: {each['msg']}" for each in error.errors()]
    if starts_ray:
        found += _ports_in_use(config.get("http_options") or {}, settings)
    return found


def _ports_in_use(http: dict[str, Any], settings: list[Settings]) -> Iterator[str]:
    http = {**_HTTP, **http}
    places = [("http_options.port", http["host"], http["port"])]
    places += [
        ("store.address", each.store.host, each.store.port) for each in settings if each.store.needs_server
    ]
    for name, host, port in places:
        try:
            check_free(host, port)
        except StoreUnavailable as error:
            yield f"{name}: {error}"


def _where(location: tuple[int | str, ...]) -> str:
    return ".".join(["args", *map(str, location)])
