"""The code on the pages about fairness runs as it stands."""

import re
from pathlib import Path

import pytest

pytest.importorskip("fairlearn")
DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize(("page", "heading"), [("fairness.md", "# Fairness"), ("adapters.md", "## fairlearn")])
def test_code_of_a_page_runs(page, heading, capsys):
    text = (DOCS / page).read_text()
    section = text[text.index(heading) :]
    section = section[: section.find("\n## PyTorch")] if page == "adapters.md" else section
    names = {}
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(code, names)
    assert "demographic parity" in capsys.readouterr().out
