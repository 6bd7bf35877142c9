"""The HTTP face: routes, bodies and errors. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import epd
from epd.deployments.answers import error_body, error_headers, to_json, to_msgpack
from epd.deployments.auth import Gate
from epd.deployments.documents import JSON, MSGPACK, accepts_msgpack, media_type
from epd.deployments.errors import (
    EPDError,
    MalformedBody,
    PayloadTooLarge,
    StageUnavailable,
    Unauthorized,
    UnknownModel,
    UnsupportedMediaType,
)
from epd.deployments.openapi import EMBEDDING_ERRORS, describe, embeddings_operation, error_responses
from epd.deployments.requests import EmbeddingRequest, read_request
from epd.deployments.service import Embedded
from epd.deployments.settings import Settings
from epd.deployments.timing import server_timing
from epd.deployments.wire import ModelCard, ModelList

__all__ = ["Application", "EmbeddingRequest", "make_app"]


class Application(Protocol):
    """What the routes call. `gate` and `settings` are those of the replica that answers."""

    settings: Settings
    gate: Gate

    async def embed_request(self, request: EmbeddingRequest) -> Embedded: ...

    async def health(self) -> dict[str, Any]: ...

    async def info(self) -> dict[str, Any]: ...


def make_app(application: Callable[[], Application]) -> FastAPI:
    """Routes over the application that `application()` returns at the time of a request."""
    app = FastAPI(
        title="EPD",
        version=epd.__version__,
        description="Multimodal embeddings",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )

    @app.post(
        "/v1/embeddings",
        openapi_extra=embeddings_operation(),
        responses=error_responses(*EMBEDDING_ERRORS),
        response_class=Response,
    )
    async def embeddings(request: Request) -> Response:
        return await _embed(request, application())

    @app.get("/v1/models", responses=error_responses(Unauthorized))
    async def models(request: Request) -> ModelList:
        served = application()
        served.gate.identify(request.headers.get("authorization"))
        return ModelList(data=[ModelCard(id=served.settings.model.served_name)])

    @app.get("/health", responses=error_responses(StageUnavailable))
    async def health() -> dict[str, Any]:
        return await application().health()

    @app.get("/info", responses=error_responses(Unauthorized, StageUnavailable))
    async def info(request: Request) -> dict[str, Any]:
        served = application()
        served.gate.identify(request.headers.get("authorization"))
        return await served.info()

    app.add_exception_handler(EPDError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_unexpected)
    describe(app)
    return app


async def _embed(request: Request, served: Application) -> Response:
    """The key is checked before the body is read, and the body's size before it is parsed."""
    limits = served.settings.limits
    caller = served.gate.admit(request.headers.get("authorization"))
    kind = media_type(request.headers.get("content-type"))
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("send the body without a Content-Encoding")
    body = await _read_body(request, limits.max_body_bytes)
    asked = await asyncio.to_thread(
        read_request,
        body,
        kind,
        max_items=limits.max_items,
        allow_urls=served.settings.fetch.enabled,
    )
    model = served.settings.model.served_name
    if asked.model is not None and asked.model != model:
        raise UnknownModel(f"this server serves {model!r}", "model")
    embedded = await served.embed_request(replace(asked, cache_salt=caller.salt(asked.cache_salt)))
    headers = None
    if request.headers.get("x-epd-timing"):
        headers = {"X-EPD-Timing": server_timing(embedded.timings)}
    if accepts_msgpack(request.headers.get("accept")):
        content = await asyncio.to_thread(to_msgpack, embedded, model)
        return Response(content, headers=headers, media_type=MSGPACK)
    content = await asyncio.to_thread(to_json, embedded, model, asked.encoding_format)
    return Response(content, headers=headers, media_type=JSON)


async def _read_body(request: Request, limit: int) -> bytearray:
    """The body, refused as soon as it is known to be larger than `limit` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise PayloadTooLarge(f"the body has {announced[:19]} bytes and at most {limit} are taken")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise PayloadTooLarge(f"the body has more than {limit} bytes, the most that are taken")
    except ClientDisconnect:
        raise MalformedBody("the body ended early") from None
    return body


def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, EPDError)
    return _json(error.body(), error.status, error_headers(error))


def _answer_http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": code}
    return _json({"error": body}, error.status_code, dict(error.headers or {}))


def _answer_unexpected(_request: Request, _error: Exception) -> Response:
    """The server logs the error; nothing of it goes into the answer."""
    return _json(EPDError("internal error").body(), 500)


def _json(body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(body), status, headers, media_type=JSON)
