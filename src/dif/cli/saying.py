"""How commands speak: errors in one line, tables on a terminal, JSON for programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dif.errors import NotASolutionError

_EXTRAS = ("cvxpy", "matplotlib", "pooch")
_state = {"debug": False}


def show_tracebacks() -> None:
    """From now on, errors come with theirs."""
    _state["debug"] = True


def debugging() -> bool:
    """Whether errors come with their traceback."""
    return _state["debug"]


@contextmanager
def one_line() -> Iterator[None]:
    """What went wrong in one line on stderr and exit code 2, no traceback; Ctrl-C says that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt as error:
        refuse("interrupted; what was finished is kept, the same command goes on from there", 130, error)
    except NotASolutionError as error:
        refuse(str(error).replace("strict=False goes on regardless, and records the residual.", "").strip(), 2, error)
    except ImportError as error:
        missing = f"{error.name} is not installed: pip install 'dif[studies]'"
        refuse(missing if error.name in _EXTRAS else str(error), 2, error)
    except OSError as error:
        known = error.strerror and error.filename
        refuse(f"{error.strerror}: {str(error.filename)!r}; name another place" if known else str(error), 2, error)
    except ValueError as error:
        refuse(str(error), 2, error)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        refuse(f"{type(error).__name__}: {error} (--debug shows where)", 2, error)


def refuse(words: str, code: int = 2, cause: BaseException | None = None) -> None:
    """Say why, and stop."""
    if debugging() and cause is not None:
        raise cause
    say(words)
    raise typer.Exit(code) from cause


def say(words: str) -> None:
    """One line on stderr."""
    typer.echo(f"dif: {printable(' '.join(words.split()))}", err=True)


def plain(text: object) -> str:
    """Data as text: no markup, no control characters that a terminal would obey."""
    return escape(printable(str(text)))


def printable(text: str) -> str:
    """Without control characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def console() -> Console:
    """Colour on a terminal, none in a pipe; there, lines are as long as they need to be."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=160)


def table(title: str, *headings: str, left: int = 1) -> Table:
    """An empty table; the first `left` columns hold words."""
    made = Table(title=title)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="left" if number < left else "right")
    return made
