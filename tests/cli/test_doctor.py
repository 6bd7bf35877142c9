"""`epd doctor`: findings, and what to do about them."""

from __future__ import annotations

import resource

import pytest

from epd.cli.doctor import (
    GIB,
    MOONCAKE_LIBRARIES,
    Finding,
    check_batched_copy,
    check_cores,
    check_libraries,
    check_locked_memory,
    check_package,
    check_python,
    check_shared_memory,
)
from epd.cli.main import main
from epd.kernels.batch_copy import BatchCopyStatus

SUBJECTS = (
    "Python", "torch", "transformers", "ray", "CUDA", "batched copy", "flash-attn", "Mooncake's libraries",
    "Mooncake", "locked memory", "/dev/shm", "CPU cores",
)  # fmt: skip


def test_everything_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each thing that the service needs or could use, and the status to match."""
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert [subject for subject in SUBJECTS if f" {subject} " not in out] == []
    assert (status == 0) == ("all that the service needs is there" in out)


def test_a_driver_is_named_by_its_version() -> None:
    """The number as NVIDIA writes it, and why copies are not batched where they are not."""
    assert check_batched_copy(BatchCopyStatus("batch", None, 13010)).found.endswith("driver 13.1")
    assert "too old" in check_batched_copy(BatchCopyStatus("ranges", "the driver is too old", 12040)).found


def test_missing_libraries_are_named_with_their_packages() -> None:
    """What the loader does not find is said in the words of the package manager."""
    finding = check_libraries(lambda name: name not in ("libnuma.so.1", "libcurl.so.4"))
    assert finding.level == "missing"
    assert finding.advice == "apt-get install libnuma1 libcurl4"
    assert check_libraries(lambda _: True).level == "ok"
    assert len(MOONCAKE_LIBRARIES) == 5


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (check_python((3, 10)), "missing"),
        (check_python((3, 12)), "ok"),
        (check_package("no-such-package"), "missing"),
        (check_locked_memory(64 * 1024), "note"),
        (check_locked_memory(resource.RLIM_INFINITY), "ok"),
        (check_shared_memory(64 * 2**20), "note"),
        (check_shared_memory(4 * GIB), "ok"),
        (check_cores(1), "note"),
        (check_batched_copy(BatchCopyStatus("ranges", "the driver is too old", 12040)), "note"),
        (check_batched_copy(BatchCopyStatus("batch", None, 12080)), "ok"),
        (check_cores(2), "ok"),
    ],
)
def test_levels(finding: Finding, level: str) -> None:
    """What the service needs is missing, what would help is a note; both say what to do."""
    assert finding.level == level
    assert bool(finding.advice) == (level != "ok")
