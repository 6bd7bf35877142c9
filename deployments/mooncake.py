"""The managed store: `mooncake_master` and the segment's owner, started and supervised by one replica."""

from __future__ import annotations

import asyncio
from typing import Any

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.mooncake_server import MooncakeServer
from epd.deployments.settings import StoreSettings


class MooncakeStore:
    """Rows live in the memory of the segment's owner, so they outlive encoders and embedders."""

    def __init__(self, settings: StoreSettings) -> None:
        self._server = MooncakeServer(
            host=settings.host,
            rpc_port=settings.port,
            metrics_port=settings.metrics_port,
            segment_bytes=settings.segment_bytes,
            protocol=settings.protocol,
            device=settings.device,
        )
        self._server.start()

    async def ready(self) -> bool:
        """Whether the service does without the store: the master or the segment's owner is down."""
        try:
            await self.check_health()
        except StoreUnavailable:
            return True
        return False

    async def check_health(self) -> None:
        await asyncio.to_thread(self._server.check)

    async def stats(self) -> dict[str, Any]:
        server = self._server
        return {
            "address": server.address,
            "restarts": server.num_restarts,
            "master_pid": server.master.pid,
            "owner_pid": server.owner.pid,
        }

    def __del__(self) -> None:
        if server := getattr(self, "_server", None):
            server.stop()
