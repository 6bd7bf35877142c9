"""The process that owns the storage segment: rows lie in it, so they outlive whoever wrote them.

    python -m epd.cache.stores.segment_owner --master HOST:PORT --host HOST --segment-bytes N

Writes `ready` to its standard output once the segment is mounted, then lives until it is killed.
"""

from __future__ import annotations

import argparse
import signal
import sys

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.mooncake_library import import_store

_LOCAL_BUFFER_BYTES = 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--master", required=True, help="host:port of mooncake_master")
    parser.add_argument("--host", required=True, help="address under which other hosts reach this one")
    parser.add_argument("--segment-bytes", required=True, type=int)
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--device", default="", help="RDMA device names, comma-separated")
    args = parser.parse_args()
    try:
        library = import_store()
    except StoreUnavailable as error:
        sys.exit(str(error))
    client = library.MooncakeDistributedStore()
    status = client.setup(
        args.host,
        "P2PHANDSHAKE",
        args.segment_bytes,
        _LOCAL_BUFFER_BYTES,
        args.protocol,
        args.device,
        args.master,
    )
    if status:
        sys.exit(f"cannot mount a segment of {args.segment_bytes} bytes at {args.master}: code {status}")
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
