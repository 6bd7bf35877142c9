"""What a replica does first: its logs, and what it says of Ray's start flags."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from epd.deployments.replica import prepare_replica


class Records(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def serve_records() -> Iterator[Records]:
    """What reaches the handlers of Serve's logger; both loggers are left as they were."""
    ours, serves = logging.getLogger("epd"), logging.getLogger("ray.serve")
    before = (ours.handlers, ours.propagate, ours.level, serves.level)
    records = Records()
    serves.addHandler(records)
    serves.setLevel(logging.INFO)
    yield records
    serves.removeHandler(records)
    ours.handlers, ours.propagate = before[0], before[1]
    ours.setLevel(before[2])
    serves.setLevel(before[3])


def test_our_records_go_where_serve_s_go(serve_records: Records) -> None:
    """At the level that Serve's logger has, and once however often the replica is prepared."""
    prepare_replica(niceness=0)
    prepare_replica(niceness=0)
    logging.getLogger("epd.cache.controller").info("told")
    logging.getLogger("epd.cache.controller").debug("not told")
    assert serve_records.messages == ["told"]


@pytest.mark.parametrize(("niceness", "is_warned"), [(0, False), (-5, False), (15, True)])
def test_a_replica_that_gives_way_to_others_says_so(
    serve_records: Records, niceness: int, is_warned: bool
) -> None:
    """Ray's own default is 15; the warning names the flag."""
    prepare_replica(niceness)
    assert [("RAY_worker_niceness=0" in message) for message in serve_records.messages] == [True] * is_warned
