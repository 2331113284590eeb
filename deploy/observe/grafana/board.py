"""What a board is: sections of plots of expressions, and how it becomes Grafana's JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grafanalib._gen import DashboardEncoder
from grafanalib.core import Dashboard, GridPos, RowPanel, Target, Template, Templating, Time, TimeSeries

SOURCE = "${datasource}"
WIDTH, COLUMNS, HEIGHT = 24, 3, 8
"""Grafana's grid has 24 columns; a panel takes a third of them."""


@dataclass(frozen=True)
class Line:
    """One expression. `legend` names its series, with labels in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Plot:
    title: str
    unit: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Section:
    title: str
    plots: tuple[Plot, ...]


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    sections: tuple[Section, ...]


def plot(title: str, unit: str, *lines: tuple[str, str]) -> Plot:
    return Plot(title, unit, tuple(Line(expr, legend) for expr, legend in lines))


def rates(title: str, metric: str, label: str, unit: str = "ops", where: str = "") -> Plot:
    """A counter a second, by one label. A counter with labels does not exist before its first event."""
    return plot(
        title, unit, (f"sum by ({label}) (rate({metric}{where}[5m])) or vector(0)", f"{{{{{label}}}}}")
    )


def quantiles(title: str, metric: str) -> Plot:
    """Half, and 19 of 20, of a histogram's observations are faster."""
    lines = [
        (f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket[5m])))", f"p{share * 100:g}")
        for share in (0.5, 0.95, 0.99)
    ]
    return plot(title, "s", *lines)


def of_step(title: str, unit: str, *names: str) -> Plot:
    """Values of the trainer's last step."""
    return plot(title, unit, *((f"weir_trainer_{name.replace('/', '_')}", name) for name in names))


def dashboard(board: Board) -> Dashboard:
    """The board as Grafana knows it."""
    source = Template(
        name="datasource", label="Data source", type="datasource", query="prometheus", default=""
    )
    return Dashboard(
        title=board.title,
        uid=f"weir-{board.name}",
        tags=["weir"],
        timezone="browser",
        refresh="10s",
        time=Time("now-1h", "now"),
        templating=Templating(list=[source]),
        panels=list(_panels(board.sections)),
    ).auto_panel_ids()


def _panels(sections: Sequence[Section]) -> Iterator[RowPanel | TimeSeries]:
    y, width = 0, WIDTH // COLUMNS
    for section in sections:
        yield RowPanel(title=section.title, gridPos=GridPos(h=1, w=WIDTH, x=0, y=y))
        y += 1
        for index, each in enumerate(section.plots):
            row, column = divmod(index, COLUMNS)
            place = GridPos(h=HEIGHT, w=width, x=column * width, y=y + row * HEIGHT)
            yield _time_series(each, place)
        y += HEIGHT * -(-len(section.plots) // COLUMNS)


def _time_series(each: Plot, place: GridPos) -> TimeSeries:
    targets = [
        Target(expr=line.expr, legendFormat=line.legend, refId=chr(ord("A") + index), datasource=SOURCE)
        for index, line in enumerate(each.lines)
    ]
    return TimeSeries(
        title=each.title, unit=each.unit, dataSource=SOURCE, targets=targets, gridPos=place, fillOpacity=5
    )


def text_of(board: Board) -> str:
    """The board's file."""
    made: dict[str, Any] = dashboard(board).to_json_data()
    return json.dumps(made, cls=DashboardEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
