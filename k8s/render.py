"""Writes the Serve configuration of every overlay into its manifest.

    python k8s/render.py            # after a change of configs/cluster.yaml or of a values.yaml
    python k8s/render.py --check    # exits 1, naming them, when manifests are not up to date

A Serve configuration is one string inside a RayService, which kustomize cannot patch. So `serve-config.yaml`
of the base and of each overlay is made here: configs/cluster.yaml, with each `values.yaml` on the way to the
overlay laid over it. In those a mapping is merged key by key, a `null` takes a key away, and
the entries of `deployments` are merged by their names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parent
CLUSTER = K8S.parent / "configs" / "cluster.yaml"
RAY_SERVICE = "epd"

# What each folder with a manifest lays its values over.
PARENTS = {
    "base": None,
    "overlays/cpu-demo": "base",
    "overlays/gpu": "base",
    "overlays/gpu-rdma": "overlays/gpu",
    "overlays/ha": "overlays/gpu",
}

_HEADER = "# Made by k8s/render.py from configs/cluster.yaml and values.yaml: change those.\n"


def serve_config(folder: str) -> dict[str, Any]:
    """The Serve configuration of `folder`, a key of PARENTS."""
    parent = PARENTS[folder]
    config = yaml.safe_load(CLUSTER.read_text()) if parent is None else serve_config(parent)
    values = K8S / folder / "values.yaml"
    changes = yaml.safe_load(values.read_text()) if values.exists() else {}
    config = merged(config, {"applications": [{"name": "epd", **changes}]})
    assert isinstance(config, dict)
    return config


def merged(old: Any, new: Any) -> Any:
    """`new` laid over `old`; see the module's docstring."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = dict(old)
        for key, value in new.items():
            if value is None:
                both.pop(key, None)
            else:
                both[key] = merged(both.get(key), value)
        return both
    if is_named(old) and is_named(new):
        changes = {entry["name"]: entry for entry in new}
        unknown = changes.keys() - {entry["name"] for entry in old}
        if unknown:
            raise ValueError(f"there is no {', '.join(sorted(unknown))} to change")
        return [merged(entry, changes.get(entry["name"], {})) for entry in old]
    return new


def is_named(value: Any) -> bool:
    """Whether it is a list whose entries have names."""
    return isinstance(value, list) and all(isinstance(entry, dict) and "name" in entry for entry in value)


def manifest(folder: str) -> str:
    """A patch of the RayService, in strategic-merge form."""
    text = yaml.safe_dump(serve_config(folder), sort_keys=False, width=100)
    indented = "".join(f"    {line}\n" for line in text.splitlines())
    return (
        f"{_HEADER}apiVersion: ray.io/v1\nkind: RayService\nmetadata:\n  name: {RAY_SERVICE}\n"
        f"spec:\n  serveConfigV2: |\n{indented}"
    )


def stale() -> Iterator[Path]:
    """Manifests that are not what they would be made to."""
    for folder in PARENTS:
        path = K8S / folder / "serve-config.yaml"
        if not path.exists() or path.read_text() != manifest(folder):
            yield path


def main() -> None:
    paths = list(stale())
    if "--check" in sys.argv[1:]:
        if paths:
            sys.exit(f"not up to date, run k8s/render.py: {', '.join(map(str, paths))}")
        return
    for path in paths:
        path.write_text(manifest(str(path.parent.relative_to(K8S))))
        print(f"wrote {path.relative_to(K8S.parent)}")


if __name__ == "__main__":
    main()
