"""S3: 28 short and 4 long outputs at once on one core, against transformers' static and its continuous batching.

Owns: the rows. `static_batching.py` runs the three in turn, in one process.
"""

from __future__ import annotations

from collections.abc import Iterator

from bars import Better, Measure, Row
from case import Options
from static_batching import NUM_LONG, NUM_SHORT, measure

BARS = {"static": 3.0, "continuous": 1.5}
PROMPT, SHORT, LONG = 64, 16, 128


def rows(options: Options) -> Iterator[Row]:
    options.pin_here()
    short, long = (2, 4) if options.quick else (SHORT, LONG)
    lengths, seconds, _ = measure(options.model, PROMPT, short, long, options.rounds_or(3))
    speeds = {way: tuple(sum(lengths) / each_s for each_s in times) for way, times in seconds.items()}
    for way, bar in BARS.items():
        measured = Measure(f"transformers {way}", Better.MORE, bar, speeds["baton"], speeds[way])
        yield Row("S3", f"{NUM_SHORT} outputs of {short}, {NUM_LONG} of {long} tokens", "tokens/s", (measured,))
