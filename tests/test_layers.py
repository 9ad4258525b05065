"""Imports go strictly down, and estimators never import each other."""

import ast
from pathlib import Path

import dif

ROOT = Path(dif.__file__).parent

# From the bottom up; modules of one line may not import each other.
LAYERS = [
    ["errors"],
    ["shards", "user_code"],
    ["parameters", "progress", "reading", "files", "limits", "metric", "trust_region", "extrapolation", "memory"],
    ["perturbation", "structure"],
    ["constraint"],
    ["term"],
    ["storage"],
    ["samples", "problem"],
    ["linear_maps"],
    ["cost"],
    ["derivatives"],
    ["rows", "loss_checks"],
    ["probe"],
    ["program", "stack"],
    ["direction", "kinks", "kkt", "curvature", "reduced_qp", "checkpoint", "primal_dual"],
    ["active_set", "conjugate_gradients", "augmented_lagrangian"],
    ["linear_solve", "refinement"],
    ["kkt_step"],
    ["solution"],
    ["fit", "nearby", "agreement", "targets", "certificate"],
    ["fingerprint", "streamed", "farm", "description"],
    ["influence", "kept"],
    ["assessment", "verdict"],
    ["linearisation", "path", "cleaning"],
    ["reach"],
    [
        "estimators.directional",
        "estimators.classical",
        "estimators.penalty",
        "estimators.newton",
        "estimators.following",
        "estimators.retraining",
    ],
    ["adaptive", "bound_curve", "choosing"],
    ["__init__"],
    ["plots", "data.__init__", "data.credit", "report"],
    [
        "adapters.quadratic_program",
        "adapters.parameter_terms",
        "adapters.cooper",
        "adapters.linear_models",
        "adapters.checkpoints",
    ],
    ["adapters.cvxpy", "adapters.constrained"],
    ["adapters.sklearn"],
    ["studies.results"],
    ["studies.toy", "studies.regression", "studies.network", "studies.plain", "studies.digits"],
    ["studies.cnn"],
    ["studies.ablation", "studies.credit", "studies.groups", "studies.attribution", "studies.calibration"],
    ["examples.credit"],
    ["cli.saying"],
    ["cli.studies", "cli.model"],
    ["cli.__init__"],
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):  # annotations are not imports
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dif":
            inside = node.module.removeprefix("dif").removeprefix(".") or "__init__"
            names = [f"{inside}.{a.name}" for a in node.names]
            found |= {n for n in names if n in LEVEL} or {inside}
        elif isinstance(node, ast.Import):
            found |= {
                (a.name.removeprefix("dif").removeprefix(".") or "__init__")
                for a in node.names
                if a.name.split(".")[0] == "dif"
            }
    return found


def modules() -> dict[str, Path]:
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(ROOT.rglob("*.py"))}


def test_every_module_has_its_layer():
    packages = {"adapters.__init__", "estimators.__init__", "studies.__init__", "__main__"}
    assert set(modules()) - packages == set(LEVEL)


def test_imports_go_strictly_down():
    upward = [
        f"{module} imports {other}"
        for module, path in modules().items()
        if module in LEVEL
        for other in imports_of(path)
        if other in LEVEL and LEVEL[other] >= LEVEL[module]
    ]
    assert upward == []


def test_adapters_use_the_public_interface_alone():
    adapters = {module: path for module, path in modules().items() if module.startswith("adapters.")}
    assert {other for path in adapters.values() for other in imports_of(path)} <= {"__init__", *adapters}


def test_only_the_bottom_calls_autograd():
    allowed = {
        "linear_maps",
        "derivatives",
        "rows",
        "loss_checks",
        "probe",
        "parameters",
        "studies.plain",
    }  # the last shares nothing with us
    calls = ("from torch.func", "torch.func.grad(", "torch.func.vjp(", "autograd import", "torch.autograd.grad(")
    offenders = [m for m, p in modules().items() if m not in allowed and any(c in p.read_text() for c in calls)]
    assert offenders == []


def test_files_stay_short():
    long = {m: n for m, p in modules().items() if (n := len(p.read_text().splitlines())) > 420}
    assert long == {}
