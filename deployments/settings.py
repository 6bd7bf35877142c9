"""The application's settings: one frozen model, unknown keys refused, checked across fields before start."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd.cache.kv.settings import KVSettings

_ETCD = "etcd://"


def _is_endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(re.fullmatch(r"[^:/;\s]+", host)) and port.isdecimal() and 0 < int(port) < 65536


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Frozen):
    """Which checkpoint to serve, and how."""

    path: str = Field("demo", description="a local folder, a hub id, or `demo`: the one in this package")
    revision: str | None = Field(None, description="a hub revision; none for a local folder")
    name: str | None = Field(None, description="the name that /v1/models shows; default: `path`")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the checkpoint's own on CUDA, float32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: CUDA where the cluster has a GPU"
    )

    @property
    def served_name(self) -> str:
        return self.name or self.path


class StageSettings(_Frozen):
    """One stage's batching and its page pool."""

    max_batch_tokens: int = Field(16384, gt=0)
    max_batch_items: int = Field(256, gt=0)
    max_queued_tokens: int = Field(262144, gt=0, description="beyond it the stage answers 429 at once")
    pool_bytes: int = Field(256 * 2**20, gt=0, description="the pinned page pool of one replica")
    page_tokens: int = Field(16, gt=0, description="rows of one page")


class StoreSettings(_Frozen):
    """Where rows live outside the replicas."""

    backend: Literal["mooncake", "shared_memory"] = Field(
        "mooncake", description="shared_memory: one host, no server; `host_bytes` is all there is"
    )
    managed: bool = Field(
        True, description="start and supervise mooncake_master and the segment's owner on this host"
    )
    address: str = Field(
        "127.0.0.1:50051",
        description="host:port of mooncake_master's RPC; with several masters, not managed here, "
        "etcd://host:port[;host:port...]: the etcd through which they choose a leader",
    )
    metrics_port: int = Field(9003, ge=1, le=65535, description="of a managed master")
    segment_bytes: int = Field(512 * 2**20, gt=0, description="memory of a managed segment")
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = Field("", description="RDMA devices, as Mooncake names them")
    timeout_s: float = Field(2.0, gt=0, description="longest a request waits for one store call")
    publish_grace_s: float = Field(
        0.05, ge=0, description="a put that takes longer no longer holds up the answer: its rows go directly"
    )
    client_host: str = Field(
        "127.0.0.1",
        description="address of a replica's host, for others; auto: the address of its own Ray node, "
        "which in Kubernetes is the pod's",
    )
    host_bytes: int = Field(
        0,
        ge=0,
        description="memory that the replicas of a host, or pod, share in front of Mooncake",
    )
    host_path: str = Field(
        "/dev/shm",
        description="the folder in which that memory lies; for several pods, a volume that they share",
    )
    start_timeout_s: float = Field(60.0, gt=0, description="longest a replica waits for the master at start")

    @property
    def needs_server(self) -> bool:
        """Whether the application starts and supervises Mooncake itself."""
        return self.managed and self.backend == "mooncake"

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.managed and self.address.startswith(_ETCD):
            raise ValueError(
                f"store.address is {self.address!r} but store.managed is true: a managed master needs no etcd"
            )
        etcd = self.address.startswith(_ETCD)
        endpoints = self.address.removeprefix(_ETCD).split(";")
        if not all(map(_is_endpoint, endpoints)) or (len(endpoints) > 1 and not etcd):
            raise ValueError(
                f"store.address must be host:port or etcd://host:port[;host:port...], got {self.address!r}"
            )
        if self.backend == "shared_memory" and not self.host_bytes:
            raise ValueError(
                f"store.backend is 'shared_memory' but store.host_bytes is {self.host_bytes}: "
                f"say how much of {self.host_path} it may take"
            )
        if not self.host_path.startswith("/"):
            raise ValueError(f"store.host_path must be an absolute path, got {self.host_path!r}")
        if self.managed and self.port == self.metrics_port:
            raise ValueError(
                f"store.address uses port {self.port} and store.metrics_port is {self.metrics_port}: "
                "the master needs two ports"
            )
        if self.protocol == "tcp" and self.device:
            raise ValueError(f"store.device is {self.device!r} but store.protocol is 'tcp'")
        return self


class LimitSettings(_Frozen):
    """What one request may ask for."""

    max_items: int = Field(2048, gt=0)
    max_tokens_per_item: int = Field(16384, gt=0)
    max_tokens_per_request: int = Field(262144, gt=0)
    max_text_chars_per_item: int = Field(2**20, gt=0, description="refused before it is tokenised")
    max_body_bytes: int = Field(64 * 2**20, gt=0)
    max_image_pixels: int = Field(89478485, gt=0, description="pixels of one picture before it is resized")
    request_timeout_s: float = Field(60.0, gt=0)


class AuthSettings(_Frozen):
    """Who may ask, and how often. Without a source of keys everyone may."""

    keys_file: str | None = Field(
        None, description="a file with one API key a line; blank lines and those from # on do not count"
    )
    keys_env: str | None = Field(
        None, description="an environment variable with API keys, commas or white space between them"
    )
    isolate_cache: bool = Field(
        False, description="callers with different keys never share cached pictures, nor their timing"
    )
    requests_per_minute: int | None = Field(None, gt=0, description="of each key, at each Ingress replica")
    burst: int = Field(10, gt=0, description="requests of one key that may come at once")

    @property
    def enabled(self) -> bool:
        return self.keys_file is not None or self.keys_env is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.enabled and (self.isolate_cache or self.requests_per_minute):
            raise ValueError(
                f"auth.isolate_cache is {self.isolate_cache} and auth.requests_per_minute is "
                f"{self.requests_per_minute}, but neither auth.keys_file nor auth.keys_env is set"
            )
        return self


class FetchSettings(_Frozen):
    """Whether and how pictures are fetched from URLs. Private addresses are never fetched from."""

    enabled: bool = False
    hosts: tuple[str, ...] = Field(
        (),
        description="`example.org`, `example.org:8443`, `*.example.org` (any depth below it), or `*`; "
        "without a port only the scheme's own is allowed",
    )
    schemes: tuple[Literal["https", "http"], ...] = Field(("https",), min_length=1)
    max_bytes: int = Field(20 * 2**20, gt=0, description="of one picture")
    max_bytes_per_request: int = Field(64 * 2**20, gt=0)
    max_redirects: int = Field(3, ge=0)
    max_concurrent: int = Field(16, gt=0, description="connections of one Ingress replica")
    timeout_s: float = Field(10.0, gt=0, description="for one picture, from name to last byte")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and not self.hosts:
            raise ValueError("fetch.enabled is true but fetch.hosts is empty: list the hosts, or `*` for any")
        for host in self.hosts:
            if not re.fullmatch(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:\d{1,5})?", host):
                raise ValueError(
                    f"fetch.hosts has {host!r}: expected a lower-case host name, as in its description"
                )
        return self


class Settings(_Frozen):
    """Arguments of `epd.deployments.app:build`."""

    model: ModelSettings = ModelSettings()
    encoder: StageSettings = StageSettings()
    embedder: StageSettings = StageSettings()
    store: StoreSettings = StoreSettings()
    kv: KVSettings = KVSettings()
    limits: LimitSettings = LimitSettings()
    auth: AuthSettings = AuthSettings()
    fetch: FetchSettings = FetchSettings()
    cpu_threads: int = Field(1, gt=0, description="torch threads of one replica without a GPU")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.limits.max_tokens_per_item > self.limits.max_tokens_per_request:
            raise ValueError(
                f"limits.max_tokens_per_item is {self.limits.max_tokens_per_item} but "
                f"limits.max_tokens_per_request is {self.limits.max_tokens_per_request}"
            )
        if self.limits.max_tokens_per_item > self.kv.max_total_tokens:
            raise ValueError(
                f"limits.max_tokens_per_item is {self.limits.max_tokens_per_item} but "
                f"kv.max_total_tokens is {self.kv.max_total_tokens}: no such item could run"
            )
        for name, stage in (("encoder", self.encoder), ("embedder", self.embedder)):
            if stage.max_queued_tokens < self.limits.max_tokens_per_request:
                raise ValueError(
                    f"{name}.max_queued_tokens is {stage.max_queued_tokens} but "
                    f"limits.max_tokens_per_request is {self.limits.max_tokens_per_request}: "
                    "such a request could never be queued"
                )
        return self

    def resolved(self, *, has_gpu: bool) -> Settings:
        """The same settings with `model.device` decided."""
        device = self.model.device
        if device == "auto":
            device = "cuda" if has_gpu else "cpu"
        return self.model_copy(update={"model": self.model.model_copy(update={"device": device})})
