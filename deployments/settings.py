"""The application's settings: one frozen model, unknown keys refused, checked across fields before start."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSettings(_Frozen):
    """Which checkpoint to serve, and how."""

    path: str = Field("demo", description="a local folder, a hub id, or `demo`: the checkpoint in this package")
    revision: str | None = Field(None, description="a hub revision; none for a local folder")
    name: str | None = Field(None, description="the name that /v1/models shows; default: `path`")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: the checkpoint's own on CUDA, float32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where the cluster has a GPU")

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

    backend: Literal["mooncake"] = "mooncake"
    managed: bool = Field(
        True, description="start and supervise mooncake_master and the segment's owner on this host"
    )
    address: str = Field("127.0.0.1:50051", description="host:port of mooncake_master's RPC")
    metrics_port: int = Field(9003, ge=1, le=65535, description="of a managed master")
    segment_bytes: int = Field(512 * 2**20, gt=0, description="memory of a managed segment")
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = Field("", description="RDMA devices, as Mooncake names them")
    timeout_s: float = Field(5.0, gt=0, description="longest a request waits for one store call")
    start_timeout_s: float = Field(60.0, gt=0, description="longest a replica waits for the master at start")

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not re.fullmatch(r"[^:\s]+:\d{1,5}", self.address) or not 0 < self.port < 65536:
            raise ValueError(f"store.address must be host:port, got {self.address!r}")
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
    max_tokens_per_item: int = Field(32768, gt=0)
    max_tokens_per_request: int = Field(262144, gt=0)
    max_body_bytes: int = Field(64 * 2**20, gt=0)
    max_image_pixels: int = Field(89478485, gt=0, description="pixels of one picture before it is resized")
    request_timeout_s: float = Field(60.0, gt=0)


class Settings(_Frozen):
    """Arguments of `epd.deployments.app:build`."""

    model: ModelSettings = ModelSettings()
    encoder: StageSettings = StageSettings()
    embedder: StageSettings = StageSettings()
    store: StoreSettings = StoreSettings()
    limits: LimitSettings = LimitSettings()
    cpu_threads: int = Field(1, gt=0, description="torch threads of one replica without a GPU")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.limits.max_tokens_per_item > self.limits.max_tokens_per_request:
            raise ValueError(
                f"limits.max_tokens_per_item is {self.limits.max_tokens_per_item} but "
                f"limits.max_tokens_per_request is {self.limits.max_tokens_per_request}"
            )
        return self
