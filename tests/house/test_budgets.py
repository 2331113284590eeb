"""The house keeps its budgets, in `budgets.yaml`. The `test_path.py` of services hold those of the paths."""

from pathlib import Path

import yaml

from bench.house import HERE, lines_of, names_twice, product, with_one_importer

BUDGETS = yaml.safe_load((Path(__file__).parent / "budgets.yaml").read_text(encoding="utf-8"))


def test_the_product_has_few_files_and_lines() -> None:
    sources = product()
    assert len(sources) <= BUDGETS["files"]
    assert sum(source.lines for source in sources) <= BUDGETS["lines"]
    assert lines_of(HERE / "tests") <= BUDGETS["lines_of_tests"]


def test_a_short_module_with_one_importer_lives_in_it() -> None:
    assert set(with_one_importer(product())) == set(BUDGETS["one_importer"])


def test_a_file_name_occurs_once() -> None:
    assert not names_twice(product())


def test_each_protocol_has_a_reason() -> None:
    assert {name for source in product() for name in source.protocols} == set(BUDGETS["protocols"])
