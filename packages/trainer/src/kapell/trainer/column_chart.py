"""The flow of columns as a picture: a row per column, a place per stage, a line from its writer to its last reader."""

from __future__ import annotations

from html import escape

from .explain import DATA, METRICS, ColumnFlow, StepFlow

__all__ = ["column_chart"]

_LEFT, _TOP, _PLACE, _ROW, _RADIUS, _MARGIN = 190, 96, 108, 22, 5, 16
_CHARACTERS = 17  # of a role's name that fit into a place
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2937 }
  .stage { font-weight: 600 }
  .role { font-size: 10px; fill: #6b7280 }
  .grid { stroke: #e5e7eb } .band { fill: #f8fafc }
  .life { stroke: #94a3b8; stroke-width: 2 }
  .writes { fill: #2563eb } .reads { fill: #fff; stroke: #d97706; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #111827 } .band { fill: #1a2332 } text { fill: #e5e7eb } .role { fill: #9ca3af }
    .grid { stroke: #374151 } .reads { fill: #111827 }
  }
"""


def column_chart(flow: StepFlow, *, title: str) -> str:
    """An SVG document that loads nothing: filled dots write, rings read. Hovering a dot names the worker's method."""
    places = {actor: _LEFT + _PLACE * (number + 0.5) for number, actor in enumerate(flow.actors)}
    width = int(_LEFT + _PLACE * len(places) + _MARGIN)
    height = _TOP + _ROW * len(flow.columns) + 44
    bottom = _TOP + _ROW * len(flow.columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_MARGIN}" y="26" style="font-size:15px;font-weight:600">{escape(title)}</text>',
    ]
    for actor, x in places.items():
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{bottom}"/>')
        parts.append(f'<text class="stage" x="{x}" y="{_TOP - 34}" text-anchor="middle">{escape(actor)}</text>')
        parts.append(f'<text class="role" x="{x}" y="{_TOP - 19}" text-anchor="middle">{_place(actor, flow)}</text>')
    for number, column in enumerate(flow.columns):
        parts += _row(column, _TOP + _ROW * (number + 0.5), places, width, shaded=number % 2 == 0)
    parts += _legend(bottom + 26)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(actor: str, flow: StepFlow) -> str:
    """Where it runs, under its name."""
    if actor in (DATA, METRICS):
        return "controller"
    roles = flow.actors[actor] or "controller"
    return escape(roles if len(roles) <= _CHARACTERS else f"{roles[: _CHARACTERS - 1]}…")


def _row(column: ColumnFlow, y: float, places: dict[str, float], width: int, *, shaded: bool) -> list[str]:
    parts = []
    if shaded:
        parts.append(f'<rect class="band" x="0" y="{y - _ROW / 2}" width="{width}" height="{_ROW}"/>')
    parts.append(f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(column.name)}</text>')
    touched = [places[actor] for actor in (*column.writers, *column.readers)]
    parts.append(f'<line class="life" x1="{min(touched)}" x2="{max(touched)}" y1="{y}" y2="{y}"/>')
    for kind, actors in (("reads", column.readers), ("writes", column.writers)):
        for actor, method in actors.items():
            words = f"{actor} {kind} {column.name}" + (f" by {method}" if method else "")
            dot = f'<circle class="{kind}" cx="{places[actor]}" cy="{y}" r="{_RADIUS}">'
            parts.append(f"{dot}<title>{escape(words)}</title></circle>")
    return parts


def _legend(y: float) -> list[str]:
    parts = []
    for number, kind in enumerate(("writes", "reads")):
        x = _LEFT + 80 * number
        parts.append(f'<circle class="{kind}" cx="{x}" cy="{y}" r="{_RADIUS}"/>')
        parts.append(f'<text x="{x + 12}" y="{y + 4}">{kind}</text>')
    return parts
