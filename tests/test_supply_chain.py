"""What dif is made of, and that nothing it reads can run code."""

import ast
import re
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dif

ROOT = Path(dif.__file__).parent
DOCS = Path(__file__).parent.parent / "docs"
PERMISSIVE = r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Unlicense|Zlib|CC0|BSL-1.0|LLVM-exception"


def collect_packages(name, found):
    """A package and all that it needs at run time, with their licences."""
    key = name.lower().replace("_", "-")
    if key in found:
        return found
    try:
        about = metadata(name)
    except PackageNotFoundError:  # for another system
        return found
    kinds = [c.split(" :: ")[-1] for c in about.get_all("Classifier") or [] if c.startswith("License")]
    found[key] = about.get("License-Expression") or "; ".join(kinds) or (about.get("License") or "").split("\n")[0]
    for line in requires(name) or []:
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            collect_packages(needed.name, found)
    return found


def test_run_time_dependencies_are_permissive_and_listed():
    found = collect_packages("directional-influence", {})
    del found["directional-influence"]
    assert {"torch", "numpy", "scipy", "daqp", "joblib", "rich", "typer"} <= set(found)
    said = (DOCS / "supply-chain.md").read_text()
    assert [name for name in found if not re.search(rf"\b{re.escape(name)}\b", said)] == []
    for name, licence in found.items():
        parts = re.split(r"\s+AND\s+|\s+WITH\s+|;", licence)
        assert all(re.search(PERMISSIVE, part) for part in parts), (name, licence)
        assert not re.search(r"\bL?GPL", licence), (name, licence)


def calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}, node.lineno


def test_nothing_is_unpickled():
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
        for function, options, line in calls(path):
            where = f"{path.name}:{line}"
            if function in ("np.load", "numpy.load"):
                assert options.get("allow_pickle") == "False", where
            if function == "torch.load":
                assert options.get("weights_only") == "True", where
            assert function not in ("eval", "exec", "joblib.load", "np.lib.format.read_array"), where


@pytest.mark.parametrize("name", ["scores.npz", "scores.npy"])
def test_a_pickle_in_disguise_is_refused(name, tmp_path):
    import numpy as np

    from dif.runtime.score_array import journal_of

    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (Path.touch, (ran,))

    path = tmp_path / name
    if name.endswith("npz"):
        np.savez(path, values=np.array([Bomb()], dtype=object), about=np.array([Bomb()], dtype=object))
    else:
        np.save(path, np.array([[Bomb()]], dtype=object), allow_pickle=True)
        head = {"fingerprint": "", "shape": [1, 1], "finished": False}
        about = {"estimator": "", "diagnostics": {}, "targets": ["b"]}
        journal_of(path).write([head, {"about": about}, {"about": {"perturbations": ["a"]}}])
    with pytest.raises(dif.InvalidInputError, match="is damaged, or was not written by dif"):
        dif.Influence.load(path)
    assert not ran.exists()
