"""``kapell plan``: what a configuration will do, before it does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .common import add_config_arguments, load, quiet_libraries, user_mistakes

if TYPE_CHECKING:
    from ..observe import ObservedStage
    from ..plan import RunPlan
    from .common import Commands

__all__ = ["add_parser"]

_CANNOT_START = 1


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "plan",
        help="show what a configuration will do: step, roles, processes, stages, keys without effect",
        description="Show what a configuration will do. One step runs in small, with a stand-in for the model; "
        "data, rewards and models are read and checked as by a run. The exit status is 1 when the run could not start.",
    )
    add_config_arguments(parser)
    parser.set_defaults(run=_plan)


def _plan(options: argparse.Namespace, console: Console) -> int:
    resolved = load(options)
    quiet_libraries()
    with console.status("running one step in small, reading data and models"):
        from ..plan import plan_run

        with user_mistakes():
            plan = plan_run(resolved)
    console.print(f"[bold]step[/bold] {escape(plan.step)}: {escape(plan.reason)}", highlight=False)
    console.print(f"  {escape(plan.summary)}", highlight=False)
    threads, backend = resolved.config.trainer.torch_threads, resolved.config.backend.name
    _print(console, "roles", ("role", "workers", "why", "in pool"), _roles(plan))
    _print(
        console,
        "resources",
        ("pool", "nodes", "processes", "device", "GPUs asked for", "backend", "torch threads each"),
        [(pool.name, pool.nodes, pool.processes, pool.device, pool.gpus, backend, threads) for pool in plan.pools],
    )
    _print(console, "one step", ("", ""), list(plan.sizes.items()))
    _print(
        console,
        "stages",
        ("stage", "runs on", "needs", "makes"),
        [(stage.name, _place(stage), ", ".join(stage.reads), ", ".join(stage.made)) for stage in plan.stages],
    )
    if plan.inactive:
        _print(
            console,
            "set, but without effect",
            ("key", "value", "from", "why"),
            [(key.key, key.value, key.origin, key.reason) for key in plan.inactive],
        )
    if plan.obstacle is None:
        return 0
    console.print(f"[bold red]cannot start:[/bold red] {escape(plan.obstacle)}", highlight=False, soft_wrap=True)
    return _CANNOT_START


def _roles(plan: RunPlan) -> list[tuple[str, ...]]:
    return [(role.name, role.worker, role.reason, role.pool) for role in plan.roles]


def _place(stage: ObservedStage) -> str:
    roles = dict.fromkeys(call.role for call in stage.calls)
    return ", ".join(roles) or "controller"


def _print(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")  # a key that is cut short is no key
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row))
    console.print(table)
