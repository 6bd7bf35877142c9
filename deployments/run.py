"""`serve run`, but Ctrl-C lets what is in flight end: `python -m epd.deployments.run config.yaml`.

Serve's own command takes its HTTP proxy down at once, and every connection with it. Here Ingress first turns
new requests away and ends those it has, while the stages behind it still run: Serve would end all deployments
at once. Then the applications are deleted, which lets the last answers out.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

import ray
from ray import serve
from ray.serve.scripts import cli

# Longest wait for requests in flight; they have deadlines of their own (`limits.request_timeout_s`).
_DRAIN_S = 60.0


def main(arguments: Sequence[str]) -> None:
    """Runs `serve run` with these arguments until Ctrl-C; a second Ctrl-C ends it at once."""
    signal.signal(signal.SIGINT, _drain)
    cli.main(["run", *arguments], prog_name="serve")


def _drain(_number: int, _frame: FrameType | None) -> None:
    """In the main thread, which else does nothing but wait."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if ray.is_initialized():
        for name in serve.status().applications:
            print(f"letting {name} end what is in flight", file=sys.stderr)
            try:
                serve.get_app_handle(name).broadcast("drain").results(timeout_s=_DRAIN_S)
            except Exception as error:  # noqa: BLE001  whatever it was, the end goes on
                print(f"{name} was not drained: {error}", file=sys.stderr)
            try:
                serve.delete(name)
            except TimeoutError as error:
                print(error, file=sys.stderr)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(sys.argv[1:])
