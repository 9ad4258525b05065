"""The README's example runs as it stands, and its two commands exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(compile(code, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "binding" in shown
    slope = float(re.search(r"slope ([\d.]+)", shown).group(1))
    assert 0.9 < slope < 1.1


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test", "lint", "bench"):
        assert f"\n{command}:" in makefile
    assert "make demo" in README
    assert "make test" in README
