"""The HTTP face: routes, bodies and errors. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from epd.deployments.errors import EPDError, PayloadTooLarge, RequestError
from epd.deployments.service import Embedded

class EmbeddingRequest(BaseModel):
    """Body of `POST /v1/embeddings`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Any = Field(description="a string, an item, or a list of these")
    model: str | None = Field(None, description="must be the served model's name when given")
    dimensions: int | None = Field(None, ge=1, description="leading values to keep before normalising")
    encoding_format: Literal["float", "base64"] = "float"
    instruction: str | None = Field(None, description="default instruction of items that bring none")
    cache_salt: str | None = Field(None, description="keeps cached pictures apart from other salts")
    user: str | None = None


class Application(Protocol):
    """What the routes call."""

    served_name: str
    max_body_bytes: int

    async def embed_request(self, request: EmbeddingRequest) -> Embedded: ...

    async def health(self) -> dict[str, Any]: ...

    async def info(self) -> dict[str, Any]: ...


def make_app(application: Callable[[], Application]) -> FastAPI:
    """Routes over the application that `application()` returns at the time of a request."""
    app = FastAPI(title="EPD", description="Multimodal embeddings", docs_url=None, redoc_url=None)

    @app.post("/v1/embeddings", openapi_extra=_body_schema())
    async def embeddings(request: Request) -> Response:
        served = application()
        body = _parse_body(await _read_body(request, served.max_body_bytes))
        if body.model is not None and body.model != served.served_name:
            raise RequestError(f"this server serves {served.served_name!r}", "model")
        embedded = await served.embed_request(body)
        content = await asyncio.to_thread(
            _encode_response, embedded, served.served_name, body.encoding_format
        )
        return Response(content, media_type="application/json")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": application().served_name, "object": "model", "owned_by": "epd"}
        return {"object": "list", "data": [card]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return await application().health()

    @app.get("/info")
    async def info() -> dict[str, Any]:
        return await application().info()

    app.add_exception_handler(EPDError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(Exception, _answer_unexpected)
    return app


def _body_schema() -> dict[str, Any]:
    content = {"application/json": {"schema": EmbeddingRequest.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


async def _read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be larger than `limit` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise PayloadTooLarge(f"the body has {announced} bytes and at most {limit} are taken")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise PayloadTooLarge(f"the body has more than {limit} bytes, the most that are taken")
    return bytes(body)


def _parse_body(body: bytes) -> EmbeddingRequest:
    try:
        return EmbeddingRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        raise RequestError(first["msg"], param) from None


def _encode_response(embedded: Embedded, model: str, encoding_format: str) -> bytes:
    encode = _as_base64 if encoding_format == "base64" else _as_floats
    data = [
        {"object": "embedding", "index": i, "embedding": encode(vector)}
        for i, vector in enumerate(embedded.vectors)
    ]
    usage = {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}
    return json.dumps({"object": "list", "data": data, "model": model, "usage": usage}).encode()


def _as_floats(vector: npt.NDArray[np.float32]) -> list[float]:
    return vector.tolist()  # type: ignore[no-any-return]


def _as_base64(vector: npt.NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, EPDError)
    headers = None if error.retry_after_s is None else {"Retry-After": f"{error.retry_after_s:.0f}"}
    return JSONResponse(error.body(), error.status, headers)


def _answer_http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": body}, error.status_code, error.headers)


def _answer_unexpected(_request: Request, _error: Exception) -> Response:
    """The server logs the error; nothing of it goes into the answer."""
    return JSONResponse(EPDError("internal error").body(), 500)
