"""Writes Grafana's boards: python deploy/observe/grafana/boards.py [DIRECTORY], by default beside itself."""

import sys
from pathlib import Path

from board import text_of
from service_boards import ENGINES, GATEWAY, OVERVIEW
from training_boards import QUEUE, TRAINING


def main(directory: Path) -> None:
    for board in (OVERVIEW, GATEWAY, ENGINES, TRAINING, QUEUE):
        (directory / f"{board.name}.json").write_text(text_of(board), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
