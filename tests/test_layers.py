"""Rooms: imports go down from room to room, and in no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dif

ROOT = Path(dif.__file__).parent
ROOMS = ["errors", "runtime", "linalg", "problem", "derivatives", "optimality", "solving", "training", "results",
         "estimators", "analyses", "evaluation"]  # fmt: skip
OUTSIDE = ["dif", "fairness", "data", "report", "adapters", "examples", "cli"]  # these use the public names
MODULES = {".".join(p.relative_to(ROOT.parent).with_suffix("").parts): p for p in ROOT.rglob("*.py")}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
VIEWS = {"dif.report.plots", "dif.report.builder"}  # imported by methods `plot` and `report` of results, when called


def find_imports(name):
    """The modules of dif that one imports, for typing too; not those with which a result shows itself when asked."""
    found, tree = set(), TREES[name]
    methods = [
        method
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and method.name in ("plot", "report")
    ]
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
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else "dif"


def test_imports_go_down():
    order = [*ROOMS, *OUTSIDE]
    upward = [
        f"{module} imports {other}"
        for module in MODULES.keys() - {"dif.__main__"}
        for other in find_imports(module)
        if order.index(room(other)) > order.index(room(module))
    ]
    assert upward == []


def test_imports_name_their_module_in_full():
    """Relative imports, and modules named by a string, would escape the other tests."""
    hidden = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and node.level)
        or (
            room(name) in ROOMS
            and isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and ast.unparse(node.args[0]) not in ("'fcntl'", "'msvcrt'")  # of one operating system
        )
    ]
    assert hidden == []


def test_no_import_goes_in_a_circle():
    order = TopologicalSorter({module: find_imports(module) for module in MODULES}).static_order()  # or a CycleError
    assert set(order) == set(MODULES)


def test_few_modules_stand_outside_the_rooms():
    # and __main__, which Python wants there for `python -m dif`
    names = {"errors", "__init__", "__main__"}
    assert {p.stem for p in ROOT.glob("*.py")} == names
    assert {p.parent.relative_to(ROOT).parts[0] for p in ROOT.rglob("*/*.py")} == {*ROOMS[1:], *OUTSIDE[1:]}


@pytest.mark.parametrize("name", [*ROOMS[1:], "fairness", "report"])
def test_every_room_says_what_belongs_there(name):
    assert ast.get_docstring(TREES[f"dif.{name}.__init__"])


def test_fairness_and_adapters_use_the_public_interface():
    fairness, adapters = ({module for module in MODULES if room(module) == name} for name in ("fairness", "adapters"))
    shared = {"dif.__init__", "dif.runtime.inputs"}  # the reader of columns
    assert {other for module in fairness for other in find_imports(module)} <= {*shared, *fairness}
    found = {(module, other) for module in adapters for other in find_imports(module)}
    found -= {("dif.adapters.quadratic_program", "dif.linalg.multiplier_qp")}  # one QP in the multipliers serves all
    assert {other for _, other in found} <= {*shared, "dif.fairness.__init__", *adapters}


def test_estimators_do_not_import_each_other():
    """Only AdaptiveInfluence is made of others."""
    defined = {
        module
        for module, tree in TREES.items()
        if room(module) == "estimators"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and {"change", "scores"} <= {getattr(n, "name", "") for n in node.body}
    } | {f"dif.estimators.{name}" for name in ("directional", "classical", "penalty")}  # these inherit both
    assert len(defined) >= 8
    for module in defined - {"dif.estimators.adaptive", "dif.estimators.protocol"}:
        assert find_imports(module) & defined <= {module, "dif.estimators.first_order", "dif.estimators.protocol"}


def test_only_two_rooms_call_autograd():
    # the adapter builds the steps of Cooper, gradients included
    allowed = {"dif.problem.parameters", "dif.adapters.cooper"}

    def differentiates(node):
        if isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            return any(f"{name}.".startswith(("torch.func.", "torch.autograd.")) for name in whole)
        if isinstance(node, ast.Attribute):
            return node.attr == "backward" or ast.unparse(node) in ("torch.func", "torch.autograd")
        return False

    others = [m for m in MODULES if room(m) not in ("derivatives", "training") and m not in allowed]
    found = {m: lines for m in others if (lines := [n.lineno for n in ast.walk(TREES[m]) if differentiates(n)])}
    assert found == {}


def test_files_stay_short():
    assert {m: n for m, p in MODULES.items() if (n := len(p.read_text().splitlines())) > 620} == {}
