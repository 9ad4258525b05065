"""Progress bars: in notebooks as HTML below the cell, elsewhere nothing without a terminal."""

import pytest

from dif.runtime import work as module
from dif.runtime.work import NotebookBar, progress


class Screen(list):
    """What a notebook shows."""

    def display(self, page, display_id):
        assert display_id
        self.append(page.data)
        return self

    def update(self, page):
        self.append(page.data)


@pytest.fixture
def screen(monkeypatch):
    pytest.importorskip("IPython")
    shown = Screen()
    monkeypatch.setattr("IPython.display.display", shown.display)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(module, "_INTERVAL", 0.0)
    return shown


def test_a_notebook_shows_a_bar_and_removes_it(screen):
    with progress("DIF <b>", 200, shown=True) as report:
        report(0)
        report(50, "round 2")
    assert screen[0] == '<progress value="0" max="200"></progress> DIF &lt;b&gt;, 0%'
    assert screen[1].startswith('<progress value="50" max="200"></progress> DIF &lt;b&gt; round 2, 25%')
    assert screen[1].endswith("s left")
    assert screen[2] == ""
    assert len(screen) == 3


def test_a_bar_is_removed_after_an_error_and_without_a_total(screen):
    def stop():
        with progress("fit", None, shown=True) as report:
            report(1, "residual 1e-3")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        stop()
    assert screen == ["<progress></progress> fit residual 1e-3, 0 s", ""]


def test_updates_are_few_and_nothing_is_shown_unasked(screen, monkeypatch):
    monkeypatch.setattr(module, "_INTERVAL", 3600.0)
    bar = NotebookBar("fit", 10)
    bar.remove()
    for done in range(10):
        bar(done)
    assert len(screen) == 1
    with progress("fit", 10, shown=False) as report:
        report(5)
    assert len(screen) == 1


def test_no_terminal_no_output(capfd):
    with progress("fit", 10, shown=True) as report:
        report(5)
    assert capfd.readouterr() == ("", "")
