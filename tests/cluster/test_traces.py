"""Spans of one request come from every process that had a part in it, and none is lost when the cluster stops."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from asking import request
from clusters import shape
from collector import Collector, Tree

from baton.proto import inference_pb2_grpc
from baton.proto.settings import ObservabilitySettings

pytestmark = pytest.mark.cluster


def test_a_cluster_that_stops_leaves_the_whole_tree_of_its_last_request(launch, tiny_model_dir):
    model_dir = tiny_model_dir("llama")
    with Collector() as collector:
        settings = ObservabilitySettings(trace_endpoint=collector.endpoint, log_format="json")
        config = replace(shape(str(model_dir), 1, 1, budget=64), observability=settings)
        with launch(config, model_dir) as cluster, grpc.insecure_channel(cluster.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            parts = list(stub.Generate(request(list(range(200)), 8), timeout=60))
        tree = Tree(collector.spans)
    assert (
        sorted(span.service for span in tree.spans) == ["baton-decode"] * 2 + ["baton-prefill"] + ["baton-router"] * 8
    )
    assert {span.trace_id for span in tree.spans} == {tree.root.trace_id}
    stages = sum(span.seconds for span in tree.children(tree.root) if not span.name.startswith("baton."))
    assert stages == pytest.approx(parts[-1].finish.timeline.total, abs=1e-6)
