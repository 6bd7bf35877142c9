"""The process that owns the storage segment: rows lie in it, so they outlive whoever wrote them.

    python -m epd.cache.stores.segment_owner --master HOST:PORT --host HOST --segment-bytes N

Writes `ready` to its standard output, and makes the `--ready-file`, once the segment is mounted. Lives until
SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.mooncake_library import import_store

_LOCAL_BUFFER_BYTES = 16 << 20
_ENDINGS = {signal.SIGTERM, signal.SIGINT}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--master", required=True, help="host:port of mooncake_master, or etcd://host:port[;host:port...]"
    )
    parser.add_argument("--host", required=True, help="address under which other hosts reach this one")
    parser.add_argument("--segment-bytes", required=True, type=int)
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--device", default="", help="RDMA device names, comma-separated")
    parser.add_argument("--ready-file", type=Path, help="made once the segment is mounted")
    parser.add_argument(
        "--unmount",
        action="store_true",
        help="at the end take the segment from the master, which lasts about two seconds: else readers are "
        "sent to it until the master's client_ttl has passed",
    )
    args = parser.parse_args()
    # Blocked before the library starts threads, which inherit it: the signals wait for sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
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
    if args.ready_file:
        args.ready_file.touch()
    print("ready", flush=True)
    signal.sigwait(_ENDINGS)
    if args.unmount:
        client.close()
    os._exit(0)  # not through the library's own end, which unmounts as well


if __name__ == "__main__":
    main()
