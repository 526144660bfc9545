"""One cluster, measured through both of its doors with the same plan: the work is the same, and so is its account."""

from __future__ import annotations

import pytest
from paper_model import PaperRunner, write_paper_tokenizer
from small_cluster import SmallCluster

from baton.capacity import workload
from baton.client import bench
from baton.client.servers import GrpcServer, OpenAIServer


@pytest.fixture(scope="module")
def paper_dir(tmp_path_factory):
    return write_paper_tokenizer(tmp_path_factory.mktemp("paper"))


async def measured(server: bench.Server) -> tuple[list[bench.Job], list[bench.Sample], bench.Report]:
    try:
        work = bench.jobs(workload.requests("random:40/12", 12, seed=3), await server.model(), seed=3)
        samples = await bench.run(server, work, concurrency=4, seed=3)
    finally:
        await server.close()
    return work, samples, bench.summarize(work, samples, bench.Objectives(ttft_ms=60_000))


async def test_both_doors_do_the_same_work_and_count_it_alike(paper_dir):
    async with SmallCluster(paper_dir, lambda: PaperRunner(step_s=0.002)) as small:
        by_grpc = await measured(GrpcServer(small.address, None, timeout_s=60.0))
        by_http = await measured(OpenAIServer(f"http://{small.http_address}", None, timeout_s=60.0))
        assert by_grpc[0] == by_http[0]
        for work, samples, report in (by_grpc, by_http):
            assert report.errors == {}
            assert (report.num_finished, report.num_other_length, report.attainment) == (12, 0, 1.0)
            assert report.output_tokens == sum(job.output_tokens for job in work)
            # One message a token, and none beside them: so a gap is the time between two tokens.
            assert all(len(sample.token_times_s) == sample.output_tokens for sample in samples)
            assert report.e2e is not None
            # Prefill, hand-off and every decode step took at least what a step is made to take.
            assert report.e2e.mean > 0.002 * (report.output_tokens / 12 - 1)
        await small.at_rest()


async def test_an_error_of_the_server_is_counted_by_its_code(paper_dir):
    async with SmallCluster(paper_dir, PaperRunner) as small:
        server = OpenAIServer(f"http://{small.http_address}", None, timeout_s=60.0)
        model = await server.model()
        wrong = bench.Job(0.0, [1] * model.max_model_len, 5)
        right = bench.Job(0.0, [1] * 10, 5)
        samples = await bench.run(server, [wrong, right, wrong], concurrency=1)
        await server.close()
        assert [sample.error for sample in samples] == ["HTTP_400", "", "HTTP_400"]
        assert "at most" in samples[0].message
