"""Run as a script, in a network of its own: two clusters whose KV takes 80 Mbit/s, and what the doctor says.

The first expects 1 GB/s of its lanes, the second 1 MB/s. Prints the two diagnoses as one JSON list.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from doctor.serving import examined, serving
from paper_model import PaperRunner

from baton.proto.settings import TransferSettings


def large_pool() -> PaperRunner:
    return PaperRunner(num_blocks=4096, block_size=256)


async def main(directory: Path) -> None:
    told = []
    for expected in (1.0, 0.001):
        transfer = TransferSettings(connector="nccl", expected_gb_per_s=expected)
        async with serving(directory, large_pool, block_size=256, transfer=transfer) as small:
            told.append((await examined(small)).to_json())
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
