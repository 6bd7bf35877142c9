"""The OpenAPI document's parts that FastAPI cannot see: bodies that the routes read by themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from epd.deployments.documents import JSON, MSGPACK
from epd.deployments.errors import (
    DeadlineExceeded,
    EPDError,
    Overloaded,
    PayloadTooLarge,
    RequestError,
    StageUnavailable,
    Unauthorized,
    UnsupportedMediaType,
)
from epd.deployments.wire import EmbeddingList, EmbeddingRequestBody, ErrorBody

_MODELS = (EmbeddingRequestBody, EmbeddingList, ErrorBody)
_REF = "#/components/schemas/{model}"
_EXAMPLES = {
    "text": {"input": ["a red circle", "two blue squares"]},
    "picture": {"input": [{"image": "data:image/png;base64,iVBORw0KGgo=", "text": "a scan"}]},
    "tokens": {"input": [[9707, 1879]], "encoding_format": "base64"},
    "messages": {
        "messages": [
            {"role": "system", "content": "Represent the picture."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
                    {"type": "text", "text": "what is it?"},
                ],
            },
        ]
    },
}


def embeddings_operation() -> dict[str, Any]:
    """What `POST /v1/embeddings` takes and answers, in both media types."""
    request = {"schema": {"$ref": _REF.format(model=EmbeddingRequestBody.__name__)}}
    answer = {"schema": {"$ref": _REF.format(model=EmbeddingList.__name__)}}
    examples = {name: {"value": value} for name, value in _EXAMPLES.items()}
    return {
        "requestBody": {
            "required": True,
            "content": {JSON: {**request, "examples": examples}, MSGPACK: request},
        },
        "responses": {
            "200": {"description": "Vectors in order", "content": {JSON: answer, MSGPACK: answer}},
        },
    }


def error_responses(*errors: type[EPDError]) -> dict[int | str, dict[str, Any]]:
    """The answers of a route for these errors, and for the one that nobody foresaw."""
    answers: dict[int | str, dict[str, Any]] = {error.status: _error(error) for error in errors}
    return answers | {EPDError.status: _error(EPDError)}


EMBEDDING_ERRORS = (
    RequestError,
    Unauthorized,
    PayloadTooLarge,
    UnsupportedMediaType,
    Overloaded,
    StageUnavailable,
    DeadlineExceeded,
)


def describe(app: FastAPI) -> None:
    """Makes `app.openapi()` hold the models of the bodies, and the optional bearer key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _, schemas = models_json_schema([(model, "validation") for model in _MODELS], ref_template=_REF)
            components = document.setdefault("components", {})
            components["schemas"] = {**components.get("schemas", {}), **schemas["$defs"]}
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{}, {"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _error(error: type[EPDError]) -> dict[str, Any]:
    lines = (error.__doc__ or "").strip().splitlines() if error is not EPDError else ["An internal error."]
    schema = {"$ref": _REF.format(model=ErrorBody.__name__)}
    return {"description": lines[0], "content": {JSON: {"schema": schema}}}
