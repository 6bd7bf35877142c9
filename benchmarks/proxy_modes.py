"""What an HTTP request costs on its way through Ray Serve, by how Serve's proxies and threads are set up.

    python -m benchmarks.proxy_modes            # rates, latencies and transfers: about 7 minutes
    python -m benchmarks.proxy_modes --checks   # what each mode does on disconnect, overload and shutdown

A no-op FastAPI ingress, alone (ping) and with one call of a no-op deployment behind it (hop). Every mode is
a Ray of its own, because its variables must be set before Ray starts; the modes take turns, ROUNDS times, and
the table has medians. Rates: requests a second over 16 connections that each wait for their answer.
p50, p99: of a hop over one connection. Replica's port: what direct ingress offers, the same replica without a
proxy. Transfers: calls between replicas with 2 MiB, one after the other. Keeps what it printed in
benchmarks/results/proxy_modes.txt and proxy_checks.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.proxy_probe import KINDS, RESULT
from benchmarks.report import RESULTS, machine, table

ROUNDS = 3
MAX_ATTEMPTS = 3
MARK = "EPD_PROXY_BENCHMARK"

ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
NICE_0 = {"RAY_worker_niceness": "0"}
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
BASELINE = "proxy"
MODES: dict[str, dict[str, str]] = {
    "proxy, nice 15": {"RAY_worker_niceness": "15"},
    BASELINE: NICE_0,
    "proxy, one loop": NICE_0 | ONE_LOOP,
    "HAProxy": NICE_0 | HAPROXY,
    "HAProxy, one loop": NICE_0 | HAPROXY | ONE_LOOP,
}
# Serve holds an ingress replica for 30 s after it was told to stop, so that load balancers notice.
SHORT_DRAIN = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5"}
CHECKED = {
    BASELINE: NICE_0,
    "proxy, one loop": NICE_0 | ONE_LOOP,
    "HAProxy": NICE_0 | HAPROXY,
    "HAProxy, one loop, drain 5 s": NICE_0 | HAPROXY | ONE_LOOP | SHORT_DRAIN,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.checks:
        report_checks({mode: run_child(mode, env, "--checks") for mode, env in CHECKED.items()})
    else:
        results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        heading = machine(f"{options.rounds} rounds")
        for _ in range(options.rounds):
            for mode, runs in results.items():
                runs.append(run_child(mode, MODES[mode]))
        report_rates(heading, results)


def report_rates(heading: str, results: Mapping[str, list[dict[str, Any]]]) -> None:
    rows, transfers = [], []
    base = median(run["proxy"]["hop"] for run in results[BASELINE])
    for mode, runs in results.items():
        for door in [door for door in runs[0] if door != "transfers"]:
            name = mode if door == "proxy" else f"{mode}: {door}"
            rows.append([name, *_rate_cells([run[door] for run in runs], base)])
        costs = [median(run["transfers"][kind] for run in runs) for kind in KINDS]
        transfers.append([mode, *(f"{cost:.1f}" for cost in costs)])
    header = ("mode", "ping/s", "hop/s", "of runs", "ratio", "p50 ms", "p99 ms")
    text = f"{heading}\nratio: hop/s to that of {BASELINE!r}\n\n{table(header, rows)}\n\n"
    text += "ms of one call with 2 MiB: array and bytes by reference, inline bytes over gRPC\n"
    text += table(("mode", *KINDS), transfers) + "\n"
    print(text, end="")
    (RESULTS / "proxy_modes.txt").write_text(text)


def _rate_cells(runs: list[dict[str, float]], base: float) -> list[str]:
    ping, hop, p50, p99 = (median(run[name] for run in runs) for name in ("ping", "hop", "p50", "p99"))
    hops = [run["hop"] for run in runs]
    spread = f"{min(hops):.0f}-{max(hops):.0f}"
    return [f"{ping:.0f}", f"{hop:.0f}", spread, f"{hop / base:.2f}", f"{p50:.1f}", f"{p99:.1f}"]


def report_checks(results: Mapping[str, dict[str, str]]) -> None:
    names = list(results[BASELINE])
    rows = [[name, *(result[name] for result in results.values())] for name in names]
    text = f"{machine()}\n\n{table(('', *results), rows)}\n"
    print(text, end="")
    (RESULTS / "proxy_checks.txt").write_text(text)


def run_child(mode: str, env: Mapping[str, str], *arguments: str) -> Any:
    """What a process of its own measured with these variables; its whole family is ended afterwards.

    On a machine too busy to start Ray it is tried again.
    """
    for attempts_left in reversed(range(MAX_ATTEMPTS)):
        mark = uuid.uuid4().hex
        with tempfile.TemporaryFile("w+") as output:  # a pipe would wait for every process that inherits it
            subprocess.run(
                [sys.executable, "-m", "benchmarks.proxy_probe", *arguments],
                env={**os.environ, **env, MARK: mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
            for pid in _pids_with(f"{MARK}={mark}"):
                os.kill(pid, signal.SIGKILL)
            output.seek(0)
            lines = output.readlines()
        for line in lines:
            if line.startswith(RESULT):
                print(f"{mode}: {line}", end="", file=sys.stderr)
                return json.loads(line.removeprefix(RESULT))
        print(f"{mode} failed, {attempts_left} attempts left: {''.join(lines[-1:])}", file=sys.stderr)
    raise RuntimeError(f"{mode} failed:\n{''.join(lines[-40:])}")


def _pids_with(mark: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:
            continue  # it ended meanwhile


if __name__ == "__main__":
    main()
