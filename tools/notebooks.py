"""Write docs/notebooks from the examples of the same name, so that there is one source: python tools/notebooks.py."""

import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
NAMES = ("data_frame", "fairlearn_credit", "finetune", "audit")


def build_notebook(name):
    """Return the example as a notebook: `# %% Title` begins a code cell, `# %% [markdown]` a cell of text."""
    text = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
    cells = []
    for title, body in re.findall(r"^# %%([^\n]*)\n(.*?)(?=^# %%|\Z)", text, flags=re.M | re.S):
        if title.strip() == "[markdown]":
            words = "\n".join(line.removeprefix("#").strip() for line in body.strip().splitlines())
            cells.append(nbformat.v4.new_markdown_cell(words))
            continue
        if title.strip():
            cells.append(nbformat.v4.new_markdown_cell(f"**{title.strip()}**"))
        cells.append(nbformat.v4.new_code_cell(body.strip()))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=kernel)


if __name__ == "__main__":
    for name in NAMES:
        path = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        nbformat.write(build_notebook(name), path)
