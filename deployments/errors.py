"""Errors that a caller of the service sees, and the one table from error to HTTP status and code.

EPDError                     500  internal_error          never the caller's fault; says nothing of its cause
├── RequestError             400  invalid_value           the caller's mistake; `param` names the value
│   ├── MalformedBody        400  malformed_body          no JSON or msgpack document
│   ├── UnsupportedField     400  unsupported_field       a field that this service does not honour
│   ├── UnknownModel         400  model_not_found         a model that is not served here
│   ├── InputTooLong         400  input_too_long          the message names both lengths
│   ├── UrlNotAllowed        400  url_not_allowed         a picture's URL that may not be fetched
│   ├── UrlFetchFailed       400  url_fetch_failed        one that may, and could not
│   ├── UnsupportedMediaType 415  unsupported_media_type
│   └── PayloadTooLarge      413  payload_too_large       the message names the limit
├── Unauthorized             401  invalid_api_key
├── RateLimited              429  rate_limit_exceeded     this key asks too often; Retry-After says when
├── Overloaded               429  overloaded              queues are full, try again later
├── StageUnavailable         503  stage_unavailable       a stage has no replica that can answer
└── DeadlineExceeded         504  deadline_exceeded       the request's deadline passed
"""

from __future__ import annotations


class EPDError(Exception):
    """Base of all errors that the service answers with."""

    status = 500
    kind = "server_error"
    code = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return f"{self.param}: {self.message}" if self.param else self.message

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as OpenAI's clients read it."""
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code},
        }


class RequestError(EPDError, ValueError):
    """The request is wrong. `param` is the path of the offending value, such as `input[3].image`."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class MalformedBody(RequestError):
    """The body is no JSON or msgpack document, or one with a key twice, NaN, or too deep a nesting."""

    code = "malformed_body"


class UnsupportedField(RequestError):
    """A field, or a value of it, that would change the vector and that this service does not honour."""

    code = "unsupported_field"


class UnknownModel(RequestError):
    """The request names a model that this service does not serve."""

    code = "model_not_found"


class InputTooLong(RequestError):
    """An item is longer than the model or the service takes; the message names both lengths."""

    code = "input_too_long"


class UrlNotAllowed(RequestError):
    """A picture's URL, or one that it redirects to, must not be fetched."""

    code = "url_not_allowed"


class UrlFetchFailed(RequestError):
    """A picture's URL could not be fetched, or not within its limits."""

    code = "url_fetch_failed"


class UnsupportedMediaType(RequestError):
    """The body's Content-Type or Content-Encoding is none that the service reads."""

    status = 415
    code = "unsupported_media_type"


class PayloadTooLarge(RequestError):
    """The request is larger than a limit of the service; the message names the limit."""

    status = 413
    code = "payload_too_large"


class Unauthorized(EPDError):
    """The request carries none of the service's API keys."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class RateLimited(EPDError):
    """The key has used up its requests; `retry_after_s` says when the next one is taken."""

    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.args = (message, retry_after_s)
        self.retry_after_s = retry_after_s


class Overloaded(EPDError):
    """The service's queues are full."""

    status = 429
    kind = "overloaded_error"
    code = "overloaded"
    retry_after_s = 1.0


class StageUnavailable(EPDError):
    """A stage has no replica that can answer now."""

    status = 503
    kind = "service_unavailable_error"
    code = "stage_unavailable"
    retry_after_s = 2.0


class DeadlineExceeded(EPDError):
    """The request was not answered within `limits.request_timeout_s`."""

    status = 504
    kind = "timeout_error"
    code = "deadline_exceeded"
