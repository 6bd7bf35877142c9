"""A replica's view of rows that its host shares: stores one object, or looks for it.

python host_rows.py put|get FOLDER

Writes `ready`, or the result of the read, to its output. Who has put stays until it is killed, as a
replica does.
"""

from __future__ import annotations

import signal
import sys
from contextlib import closing

import torch

from epd.cache.stores.base import GetResult, PutResult
from epd.deployments.settings import StoreSettings
from epd.deployments.stage import open_store

SIZE = 100_000


def main() -> None:
    what, folder = sys.argv[1:]
    rows = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
    memory = rows.clone() if what == "put" else torch.zeros_like(rows)
    settings = StoreSettings(backend="shared_memory", host_bytes=4 * SIZE, host_path=folder)
    with closing(open_store(settings)) as store:
        store.register(memory)
        buffers = [[(memory.data_ptr(), SIZE)]]
        if what == "put":
            assert store.put_from(["n/k"], buffers) == [PutResult.STORED]
            print("ready", flush=True)
            signal.pause()
        (found,) = store.get_into(["n/k"], buffers)
        print(found.name, found is GetResult.HOST and torch.equal(memory, rows), flush=True)


if __name__ == "__main__":
    main()
