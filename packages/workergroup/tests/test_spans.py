import pytest

from kapell.decorators import Dispatch, register
from kapell.workergroup import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, Worker

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


class Traced(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def work(self):
        with trace.get_tracer("user").start_as_current_span("inside"):
            return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("no")


@pytest.fixture(scope="module")
def exporter():
    exporter = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.mark.parametrize("mode", ["serial", "threads"])
def test_one_span_for_the_call_with_one_for_each_rank_below(exporter, mode):
    exporter.clear()
    with LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Traced), role="traced", mode=mode) as group:
        group.work()
    spans = exporter.get_finished_spans()
    (call,) = [span for span in spans if span.name == "traced.work"]
    ranks = [span for span in spans if span.name == "work"]
    users = [span for span in spans if span.name == "inside"]
    assert dict(call.attributes) == {"kapell.role": "traced", "kapell.method": "work", "kapell.ranks": 2}
    assert [span.parent.span_id for span in ranks] == [call.context.span_id] * 2
    assert {span.parent.span_id for span in users} == {span.context.span_id for span in ranks}
    assert {span.context.trace_id for span in spans} == {call.context.trace_id}


def test_span_of_a_failed_call_records_the_error(exporter):
    exporter.clear()
    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Traced), role="traced")
    with group, pytest.raises(ExceptionGroup):
        group.fail()
    (call,) = [span for span in exporter.get_finished_spans() if span.name == "traced.fail"]
    assert call.attributes["error.type"] == "WorkerFailedError"
