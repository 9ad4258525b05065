"""The notebooks are the examples, and run from top to bottom."""

import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from notebooks import NAMES, build_notebook  # noqa: E402


def test_each_notebook_is_its_example():
    folder = ROOT / "docs" / "notebooks"
    assert sorted(path.stem for path in folder.glob("*.ipynb")) == sorted(NAMES)
    for name in NAMES:
        assert nbformat.read(folder / f"{name}.ipynb", as_version=4) == build_notebook(name)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run(name, tmp_path):
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert printed
