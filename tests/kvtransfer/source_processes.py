"""Forks source processes: each has a connector and a pool of known bytes, and waits to be read from or killed.

Run by path with pipes; one JSON line in, one out. The parent has torch loaded but no transport, so a source is there in
half a second. All sources die with this process, stopped ones too.

    {"seed": 1, "num_blocks": 9, "settings": {...}}  ->  {"pid": 4711, "address": "4b5641...", "checksum": 123}
"""

import ctypes
import json
import os
import signal
import sys
import time

import torch

from baton.kvtransfer.connector import KvPool, open_connector
from baton.proto.messages import KvGeometry
from baton.proto.settings import TransferSettings

PR_SET_PDEATHSIG = 1


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(order):
    die_with_parent()
    shape = tuple(order["shape"])
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(order["seed"]))
    connector = open_connector(TransferSettings(**order["settings"]))
    address = connector.attach(KvPool(tensor, KvGeometry(**order["geometry"])))
    crc = connector.export("all", tuple(range(shape[0])))
    print(json.dumps({"pid": os.getpid(), "address": address.hex(), "checksum": crc}), flush=True)
    while True:
        time.sleep(60)


def main():
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            serve(json.loads(line))
            os._exit(1)


if __name__ == "__main__":
    main()
