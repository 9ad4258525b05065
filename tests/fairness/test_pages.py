"""The code on the pages about fairness runs as it stands."""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("fairlearn")
ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize(("page", "heading"), [("fairness.md", "# Fairness"), ("adapters.md", "## fairlearn")])
def test_code_of_a_page_runs(page, heading, capsys):
    text = (DOCS / page).read_text()
    section = text[text.index(heading) :]
    section = section[: section.find("\n## PyTorch")] if page == "adapters.md" else section
    names = {}
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, names)
    assert "demographic parity" in capsys.readouterr().out


@pytest.mark.parametrize("room", ["adapters", "fairness"])
def test_examples_are_code_on_the_page(room):
    """Outside of a section "Examples:", the page about the interface shows >>> as a quotation in a quotation."""
    for path in (ROOT / "src/dif" / room).glob("*.py"):
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        for text in filter(None, map(ast.get_docstring, nodes)):
            assert not re.search(r"^(>>>|Example:)", text, re.MULTILINE), (path, text)
