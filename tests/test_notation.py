"""docs/notation.md names things that exist, and every noun of the package."""

import importlib
import re
from pathlib import Path

import pytest

import dif

PAGE = (Path(__file__).parent.parent / "docs" / "notation.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("name", [re.fullmatch(r" `([\w.]+)` ", row[1]).group(1) for row in ROWS])
def test_code_exists(name):
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError:
            continue
    for attribute in parts[cut:]:
        if attribute not in ("theta",):  # set in the constructor
            found = getattr(found, attribute)
    assert found.__doc__


def test_every_row_has_a_symbol():
    assert len(ROWS) > 20
    assert all(row[0].strip() for row in ROWS)


def test_every_estimator_is_listed():
    for name in dif.__all__:
        if name.endswith("Influence") or name == "Retraining":
            assert f".{name}`" in PAGE
