"""How a process of the cluster counts, and how Prometheus reads what it has counted.

Owns: a process's registry, the labels that all of its figures have, the buckets that router and workers share, how a
page is written for who asks, and the endpoint of a process that serves no HTTP otherwise.
Refuses to know: what is counted (`router.metrics`, `engine.metrics`).

    observed where it happens:  Meter.counter, histogram -> registry --+
                                                                       +--> page
    read when somebody asks:    Figures.counter, gauge ----------------+
"""

from __future__ import annotations

import errno
import gzip
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from socket import AF_INET, AF_INET6
from socketserver import TCPServer
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder, gzip_accepted
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# A time of birth beside each counter and histogram would double the series, and rates do without it.
disable_created_metrics()  # type: ignore[no-untyped-call]

LABELS = ("model_name", "engine")

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
TOKEN_GAP_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 16)))
BYTES = tuple(float(4**power) for power in range(5, 18))
BLOCKS = tuple(float(1 << power) for power in range(14))

REQUEST_S = 10.0
"""How long an endpoint waits for the bytes of a request."""
CLOSE_POLL_S = 0.1


class Meter:
    """What one process counts where it happens. `engine`: a worker's id, or "router".

    `counter` and `histogram` return a function from further labels' values, in order, to the one that they name. Keep
    what it returns: a look-up costs more than the count.
    """

    def __init__(self, model_name: str, engine: str) -> None:
        self.model_name = model_name
        self.engine = engine
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, meaning: str, *labels: str) -> Callable[..., Counter]:
        family = Counter(name, meaning, (*LABELS, *labels), registry=self.registry)
        return partial(family.labels, self.model_name, self.engine)

    def histogram(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Callable[..., Histogram]:
        family = Histogram(name, meaning, (*LABELS, *labels), registry=self.registry, buckets=buckets)
        return partial(family.labels, self.model_name, self.engine)

    def figures(self) -> Figures:
        return Figures(self.model_name, self.engine)


class Tally:
    """A histogram of what comes with each token: it takes a quarter of the time of the library's, and no lock. Belongs
    to one thread, all but reading it."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [*self._bounds, math.inf]
        buckets = [
            (floatToGoString(bound), float(number))  # type: ignore[no-untyped-call]
            for bound, number in zip(bounds, accumulate(self._counts), strict=True)
        ]
        family.add_metric(labels, buckets, self._sum)


class Figures:
    """What is read at the moment of a scrape. The first figure of a name says what its further labels are."""

    def __init__(self, model_name: str, engine: str) -> None:
        self._values = (model_name, engine)
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        self._histograms: list[HistogramMetricFamily] = []

    def counter(self, name: str, meaning: str, value: float, **labels: str) -> None:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = CounterMetricFamily(name, meaning, labels=(*LABELS, *labels))
        family.add_metric((*self._values, *labels.values()), value)

    def gauge(self, name: str, meaning: str, value: float, **labels: str) -> None:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = GaugeMetricFamily(name, meaning, labels=(*LABELS, *labels))
        family.add_metric((*self._values, *labels.values()), value)

    def histogram(self, name: str, meaning: str, tally: Tally) -> None:
        family = HistogramMetricFamily(name, meaning, labels=LABELS)
        tally.add_to(family, self._values)
        self._histograms.append(family)

    def collect(self) -> Iterable[Metric]:
        return [*self._families.values(), *self._histograms]


@dataclass(frozen=True, slots=True)
class Page:
    """A registry and figures as one collector."""

    registry: CollectorRegistry
    figures: Figures

    def collect(self) -> Iterable[Metric]:
        yield from self.registry.collect()
        yield from self.figures.collect()


@dataclass(frozen=True, slots=True)
class Exposition:
    """A page as bytes, with the headers that tell what they are."""

    body: bytes
    headers: dict[str, str]


def expose(page: Collector, accept: str, accept_encoding: str) -> Exposition:
    """Writes a page in the format that the headers of a scrape ask for: OpenMetrics or text, compressed or not."""
    encode, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        # With any other escape the library makes vllm_ of vllm:, which needs none. All of our names are plain.
        encode = partial(generate_latest, escaping=ALLOWUTF8)
    body, headers = encode(page), {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if gzip_accepted(accept_encoding):
        return Exposition(gzip.compress(body, 1), {**headers, "Content-Encoding": "gzip"})
    return Exposition(body, headers)


class Endpoint:
    """Serves one collector by HTTP, on threads of its own: a scrape waits for nobody, and nobody for a scrape."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._server: ThreadingWSGIServer | None = None
        self._thread: threading.Thread | None = None

    def open(self, host: str, ports: Collection[int] = ()) -> str:
        """Listens on the first of these ports that is free, or on any if there are none; returns host:port."""
        server = self._bound(host, ports)
        self._server = server
        self._thread = threading.Thread(
            target=partial(server.serve_forever, CLOSE_POLL_S), name="metrics-endpoint", daemon=True
        )
        self._thread.start()
        return f"{f'[{host}]' if ':' in host else host}:{server.server_port}"

    def _bound(self, host: str, ports: Collection[int]) -> ThreadingWSGIServer:
        server_class = _Server6 if ":" in host else _Server
        for port in ports or (0,):
            try:
                return make_server(host, port, self._answer, server_class, _Handler)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(f"{host} has no free port from {min(ports)} to {max(ports)} for metrics")

    def close(self) -> None:
        """Ends it, at the next poll."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if environ["PATH_INFO"] != "/metrics":
            start_response("404 Not Found", [])
            return [b"the figures are at /metrics\n"]
        if environ["REQUEST_METHOD"] != "GET":
            start_response("405 Method Not Allowed", [("Allow", "GET")])
            return [b""]
        accept, encoding = environ.get("HTTP_ACCEPT", ""), environ.get("HTTP_ACCEPT_ENCODING", "")
        exposition = expose(self._collector, accept, encoding)
        start_response("200 OK", list(exposition.headers.items()))
        return [exposition.body]


class _Server(ThreadingWSGIServer):
    address_family = AF_INET

    def server_bind(self) -> None:
        # HTTPServer's own would ask the name service for the host's name, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Server6(_Server):
    address_family = AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *arguments: object) -> None:
        """A scrape is no event."""
