"""The numbers of a run for Prometheus: the driver's endpoint, and the engines' endpoints with vLLM's own metrics.

Invariants (tests/unit/observe): every name and label is valid in Prometheus' text format; a gauge that the newest
record lacks is not served, so that an old number is never shown as a new one.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.config.observe import PrometheusEndpoint
from megatron_rl.config.schema import BaseConfig

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

PREFIX = "megatron_rl_"


def metric_name(name: str) -> str:
    """The name of a metric in Prometheus, which allows letters, digits and underscores: `reward/mean` is
    `megatron_rl_reward_mean`. Names that differ in other characters alone, such as `a@b` and `a/b`, become the same."""
    return PREFIX + re.sub("[^a-zA-Z0-9_]", "_", name)


class NewestRecord:
    """A collector of prometheus_client: the numbers of the newest record as gauges."""

    def __init__(self, run: str) -> None:
        """
        Args:
            run: the value of the label `run`.
        """
        self._run = run
        self.record: Mapping[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        from megatron_rl.observe.metric_names import meaning

        found: dict[str, Metric] = {}
        for name, value in self.record.items():
            # The last one counts if two names become the same: a family must not be there twice.
            said = "the number of the newest step" if name == "step" else meaning(name) or name
            family = GaugeMetricFamily(metric_name(name), said, labels=["run"])
            family.add_metric([self._run], float(value))
            found[family.name] = family
        yield from found.values()


class Relabelled:
    """A collector: the vLLM metrics of another registry, with the number of our engine as the label `engine`. vLLM
    gives every engine the number 0, because each is alone in its process."""

    def __init__(self, registry: CollectorRegistry, engine: int) -> None:
        self._registry, self._engine = registry, engine

    def collect(self) -> Iterable[Metric]:
        from prometheus_client import Metric

        for family in self._registry.collect():
            if family.name.startswith("vllm"):
                own = Metric(family.name, family.documentation, family.type, family.unit)
                own.samples = [
                    sample._replace(labels={**sample.labels, "engine": str(self._engine)}) for sample in family.samples
                ]
                yield own


class PrometheusTracker:
    """Serves the newest record; it has the form of the trackers in trackers.py."""

    def __init__(
        self, section: PrometheusEndpoint, config: BaseConfig, identities: dict[str, str], resume_at: int | None
    ) -> None:
        self._newest = NewestRecord(config.run.name)
        self._stop = serve(section.port, self._newest)
        self.where = f"http://{socket.gethostname()}:{section.port}/metrics"
        if section.engines:
            self.where += f"; vLLM's own metrics: port {section.port + 1} + the engine's index, on the engine's node"

    def log(self, record: Mapping[str, float]) -> None:
        self._newest.record = record

    def close(self, finished: bool) -> None:
        self._stop()


def serve_engine(section: PrometheusEndpoint, engine: int) -> None:
    """Serve vLLM's metrics from the engine's process, until it ends.

    Raises:
        OSError: another process has the port.
    """
    from prometheus_client import REGISTRY

    serve(section.port + 1 + engine, Relabelled(REGISTRY, engine))


def serve(port: int, collector: Any) -> Callable[[], None]:
    """Serve what a collector gives at http://HOST:PORT/metrics, from a thread. Returns what ends it.

    Raises:
        OSError: another process has the port.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise OSError(f"port {port} cannot be used ({error}); choose another prometheus.port") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
