"""Writes the addresses of a Ray cluster's live nodes to its output, as a line of JSON, whenever they change.

python watch_nodes.py ADDRESS_OF_THE_HEAD
"""

from __future__ import annotations

import json
import sys
import time

import ray


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
    last = None
    while True:
        live = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
        if live != last:
            print(json.dumps(live), flush=True)
            last = live
        time.sleep(0.2)


if __name__ == "__main__":
    main()
