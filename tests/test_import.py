"""`import dif` loads what every program needs; the rest is imported when it is first used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dif

SLOW = {"joblib", "scipy", "rich", "typer", "pandas", "matplotlib", "sklearn", "cvxpy"}
SELDOM = {"dif.training", "dif.analyses", "dif.evaluation", "dif.fairness", "dif.report", "dif.cli"}


def test_what_few_programs_need_is_not_imported():
    code = "import sys, torch; before = {*sys.modules}; import dif; print(*({*sys.modules} - before))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "dif.estimators.directional" in loaded
    assert not {name for name in loaded if name.split(".")[0] in SLOW or ".".join(name.split(".")[:2]) in SELDOM}


@pytest.mark.parametrize("name", [*dif.__all__, "fairness", "report"])
def test_every_name_is_there(name):
    assert name in dir(dif) or name not in dif.__all__
    assert getattr(dif, name).__name__.split(".")[-1] == name


def test_type_checkers_see_what_is_imported_later():
    tree = ast.parse(Path(dif.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {(f"dif.{module}", name) for module, names in dif._LATER.items() for name in names}


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="module 'dif' has no attribute 'Influences'"):
        dif.Influences  # noqa: B018
