"""`serve run`, but Ctrl-C lets what is in flight end: `python -m epd.deployments.run config.yaml`.

Serve's own command takes its HTTP proxy down at once, and every connection with it. Deleting the applications
first makes Serve take no new requests, wait for those in the replicas, Ingress before the stages behind it,
and answer them; see `graceful_shutdown_timeout_s` of each deployment for how long.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

import ray
from ray import serve
from ray.serve.scripts import cli


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
                serve.delete(name)
            except TimeoutError as error:
                print(error, file=sys.stderr)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(sys.argv[1:])
