"""A web host on a loopback address that plays every trick a fetch may meet, and counts who came."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

PICTURE = b"\x89PNG a picture"


class FakeHost:
    """`async with FakeHost("127.0.0.1") as host`: answers by path.

    /picture, /redirect?to=URL, /loop, /endless (a body without end), /slow (a body that never comes),
    /mute (no answer at all), /announced (a Content-Length of 10 GB), /gzip, /cookie, /garbage (no HTTP),
    /headers (without end); anything else is a 404. `connections` counts them all; `requests` holds their
    heads. `gate`: no answer while it is shut.
    """

    def __init__(self, address: str, port: int = 0, ssl_context: ssl.SSLContext | None = None) -> None:
        self._address = address
        self.port = port
        self._ssl_context = ssl_context
        self.connections = 0
        self.open = 0
        self.most_open = 0
        self.requests: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, self._address, self.port, ssl=self._ssl_context
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            await self.gate.wait()
            await self._answer(head.split()[1], reader, writer)
        self.open -= 1
        writer.close()

    async def _answer(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(target)
        match parts.path:
            case "/picture":
                await _send(writer, f"200 OK\r\nContent-Length: {len(PICTURE)}", PICTURE)
            case "/redirect":
                await _send(writer, f"302 Found\r\nLocation: {parse_qs(parts.query)['to'][0]}")
            case "/loop":
                await _send(writer, "302 Found\r\nLocation: /loop")
            case "/cookie":
                await _send(writer, "302 Found\r\nSet-Cookie: a=b\r\nLocation: /picture")
            case "/announced":
                await _send(writer, "200 OK\r\nContent-Length: 10000000000", b"x")
            case "/gzip":
                await _send(writer, "200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1", b"x")
            case "/slow":
                await _send(writer, "200 OK\r\nContent-Length: 100", b"x")
                await reader.read()
            case "/mute":
                await reader.read()
            case "/garbage":
                await _write(writer, b"no HTTP at all\r\n\r\n")
            case "/headers":
                while True:
                    await _write(writer, b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 10_000)
            case "/endless":
                await _send(writer, "200 OK\r\nTransfer-Encoding: chunked")
                while True:
                    await _write(writer, b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
            case _:
                await _send(writer, "404 Not Found\r\nContent-Length: 0")


async def _send(writer: asyncio.StreamWriter, head: str, body: bytes = b"") -> None:
    await _write(writer, f"HTTP/1.1 {head}\r\n\r\n".encode() + body)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    await asyncio.sleep(0)  # the client, on the same loop, has its turn also while the socket takes more
