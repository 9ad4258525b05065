"""The documentation builds without a warning, and its examples run as they stand."""

import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb")}  # run by test_notebooks.py
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGES = ["index", "choosing", "groups", "extending", "frames", "auditors", "data-scientists", "pytorch"]


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem not in NOTEBOOKS], ids=lambda path: path.stem)
def test_examples_run(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where those that draw leave their figure
    monkeypatch.setenv("MPLBACKEND", "agg")
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
    drawn = "savefig" in path.read_text()
    assert [figure.name for figure in tmp_path.iterdir()] == ([f"{path.stem}.png"] if drawn else [])


def test_documentation_builds(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    silenced = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=silenced)
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    assert (tmp_path / "site" / "api" / "index.html").is_file()
    assert "Problem" in (tmp_path / "site" / "index.html").read_text()
    assert "DirectionalInfluence" in (tmp_path / "site" / "api" / "index.html").read_text()


def test_the_evaluation_page_shows_its_example():
    page = (ROOT / "docs" / "evaluation.md").read_text()
    assert f"```python\n{(ROOT / 'docs' / 'examples' / 'evaluation.py').read_text()}```" in page


def test_clones_are_installed_in_one_way():
    """Into .venv with the pinned versions; users without a clone install the distribution by its name."""
    pages = "".join(path.read_text() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    commands = re.findall(r'^.*pip install.*[ "]\.(?:\[|\s|`).*$', pages, flags=re.M)
    assert len(commands) >= 4
    assert all(".venv/bin/pip install -c constraints.txt -e " in command for command in commands), commands


def test_the_quickstart_is_the_readme():
    readme = (ROOT / "README.md").read_text()
    code = (ROOT / "docs" / "examples" / "quickstart.py").read_text()
    assert "".join(code.split()) in "".join(readme.replace("import torch, dif", "import torch import dif").split())


@pytest.mark.parametrize("page", PAGES)
def test_code_in_the_pages_is_the_code_that_runs(page):
    """Pages show whole examples, so that they can be read without being built."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    shown = [code.strip() for code in re.findall(r"```python\n(.*?)```", text, flags=re.S)]
    examples = {path.read_text().strip() for path in EXAMPLES}
    assert any(code in examples for code in shown)
    assert "--8<--" not in text


def test_examples_in_docstrings_have_a_heading():
    """Without "Examples:" above it, a >>> is rendered on the API page as a quotation in a quotation."""
    bare = []
    for name in re.findall(r"^::: ([\w.]+)", (ROOT / "docs" / "api.md").read_text(), flags=re.M):
        found = pkgutil.resolve_name(name)
        members = vars(found).values() if inspect.isclass(found) else []
        for part in (found, *(member for member in members if member.__doc__ != type(member).__doc__)):
            heading, *examples = (inspect.getdoc(part) or "").split(">>>")
            if examples and "Examples:" not in heading.splitlines():
                bare.append(f"{name}: {getattr(part, '__name__', part)}")
    assert not bare
