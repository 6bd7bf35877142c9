"""Errors that a caller of the service sees, and the one table from error to HTTP status.

EPDError
├── RequestError         400  the caller's mistake; `param` names the item
│   └── PayloadTooLarge  413
├── Overloaded           429  queues are full, try again later
├── StageUnavailable     503  a stage has no replica that can answer
└── DeadlineExceeded     504  the request's deadline passed
"""

from __future__ import annotations


class EPDError(Exception):
    """Base of all errors that the service answers with."""

    status = 500
    kind = "server_error"
    code: str | None = None
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


class PayloadTooLarge(RequestError):
    """The request is larger than a limit of the service; the message names both numbers."""

    status = 413
    code = "payload_too_large"


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
