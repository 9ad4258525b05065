"""Rooms: imports go down from room to room, and in no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dif

ROOT = Path(dif.__file__).parent
ROOMS = ["errors", "runtime", "linalg", "problem", "derivatives", "optimality", "solving", "estimators", "analyses",
         "evaluation"]  # fmt: skip
OUTSIDE = ["dif", "fairness", "data", "report", "adapters", "studies", "examples", "cli"]  # these use the public names
MODULES = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts): p for p in ROOT.rglob("*.py")}
SHIMS = {"dif.path", "dif.certificate", "dif.plots"}  # old addresses of what has moved into a room
VIEWS = {"dif.plots", "dif.report.builder"}  # imported by methods `plot` and `report` of results, when called


def find_imports(name):
    """The modules of dif that one imports, for typing too; not those with which a result shows itself when asked."""
    found, tree = set(), ast.parse(MODULES[name].read_text())
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in ("plot", "report")]
    shown = [n for method in methods for n in ast.walk(method) if getattr(n, "module", None) in VIEWS]
    for node in ast.walk(tree):
        if node in shown:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dif":
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in MODULES else node.module for a in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "dif"}
    return {f"{m}.__init__" if f"{m}.__init__" in MODULES else m for m in found}


def room(module):
    if module == "dif.__main__":
        return "cli"  # it runs the command line
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else "dif"


def test_imports_go_down():
    order = [*ROOMS, *OUTSIDE]
    upward = [
        f"{module} imports {other}"
        for module in MODULES.keys() - SHIMS
        for other in find_imports(module) - SHIMS
        if order.index(room(other)) > order.index(room(module))
    ]
    assert upward == []


def test_no_import_goes_in_a_circle():
    TopologicalSorter({module: find_imports(module) for module in MODULES}).prepare()


def test_few_modules_stand_outside_the_rooms():
    known = {"__init__", "__main__"}  # Python looks for these here, the second for `python -m dif`
    assert {p.stem for p in ROOT.glob("*.py")} - known == {"errors", "path", "certificate", "plots"}


@pytest.mark.parametrize("name", [*ROOMS[1:], "fairness", "report"])
def test_every_room_says_what_belongs_there(name):
    assert ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text()))


def test_fairness_and_adapters_use_the_public_interface_alone():
    fairness, adapters = ({module for module in MODULES if room(module) == name} for name in ("fairness", "adapters"))
    assert {other for module in fairness for other in find_imports(module)} <= {"dif.__init__", *fairness}
    public = {"dif.__init__", "dif.fairness.__init__", *adapters}
    assert {other for module in adapters for other in find_imports(module)} <= public


def test_estimators_do_not_import_each_other():
    alone = {"directional", "classical", "penalty", "newton", "path", "retraining"}
    for name in alone:
        assert not {f"dif.estimators.{other}" for other in alone - {name}} & find_imports(f"dif.estimators.{name}")


def test_only_one_room_calls_autograd():
    # the second shares nothing with us, and the last builds the steps of Cooper, gradients included
    allowed = {"dif.problem.parameters", "dif.studies.plain", "dif.adapters.cooper_loop"}
    calls = ("from torch.func", "torch.func.grad(", "torch.func.vjp(", "autograd import", "torch.autograd.grad(")
    others = [m for m in MODULES if room(m) != "derivatives" and m not in allowed]
    assert [m for m in others if any(call in MODULES[m].read_text() for call in calls)] == []


def test_files_stay_short():
    assert {m: n for m, p in MODULES.items() if (n := len(p.read_text().splitlines())) > 420} == {}
