"""Optional OpenTelemetry spans: one around each group call, one around each rank's run, joined across processes.

Spans are made when the program itself has imported ``opentelemetry``: one that has not has no exporter to send them to.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

__all__ = ["CallSpan", "start_call_span", "worker_span"]

_SCOPE = "kapell.workergroup"
_HEADER = "traceparent"


class CallSpan(NamedTuple):
    """The controller's span of one group call."""

    span: Any
    """The ``opentelemetry`` span."""
    trace: str
    """Its W3C ``traceparent``, which travels with the call; empty when the span is not recorded."""

    def end(self, error: BaseException | None) -> None:
        """Close the span, with the error that ended the call if one did."""
        if error is not None:
            self.span.record_exception(error)
            self.span.set_attribute("error.type", type(error).__name__)
        self.span.end()


def start_call_span(role: str, method: str, num_ranks: int) -> CallSpan | None:
    """A span for a group call; None unless the program uses OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    attributes = {"kapell.role": role, "kapell.method": method, "kapell.ranks": num_ranks}
    span = trace.get_tracer(_SCOPE).start_span(f"{role}.{method}", attributes=attributes)
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, trace.set_span_in_context(span))
    return CallSpan(span, carrier.get(_HEADER, ""))


@contextmanager
def worker_span(traceparent: str, method: str) -> Generator[None]:
    """The worker's span of one call, a child of the controller's; nothing where OpenTelemetry is not installed."""
    if find_spec("opentelemetry") is None:
        yield
        return
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract({_HEADER: traceparent})
    with trace.get_tracer(_SCOPE).start_as_current_span(method, context=parent):
        yield
