"""What every replica does first: its logs go where Serve's go, and it says which start flags Ray lacks."""

from __future__ import annotations

import logging
import os

# Read by Ray as it starts, so too late in a config file. Workers run at nice 15 unless told otherwise.
START_FLAGS = {"RAY_worker_niceness": "0"}

_SERVE_LOGGER = "ray.serve"

logger = logging.getLogger(__name__)


class ServeLogHandler(logging.Handler):
    """Hands our records to Serve's logger: its files and format (`logging_config`), with the request's id."""

    def emit(self, record: logging.LogRecord) -> None:
        serve_logger = logging.getLogger(_SERVE_LOGGER)
        if serve_logger.isEnabledFor(record.levelno):
            serve_logger.handle(record)


def prepare_replica(niceness: int | None = None) -> None:
    """Call it once, as a deployment starts. niceness: of this process; None asks the system."""
    ours = logging.getLogger("epd")
    ours.handlers = [ServeLogHandler()]
    ours.propagate = False
    ours.setLevel(logging.getLogger(_SERVE_LOGGER).getEffectiveLevel())
    if niceness is None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness > 0:
        logger.warning(
            "this replica runs at niceness %d, behind other work of the host: start Ray with "
            "RAY_worker_niceness=0, as `epd serve` does",
            niceness,
        )
