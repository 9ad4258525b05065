"""Errors keep their four parts, travel between processes, and each of their texts is asserted by a test."""

import ast
import copy
import pickle
import re
from pathlib import Path

import pytest
from refusals import ERRORS

import dif

SOURCES = sorted(Path(dif.__file__).parent.rglob("*.py"))


def texts_of(calls):
    """The literal strings of the `meaning` of every DifError built in the sources, with where they stand."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
            if name not in calls:
                continue
            meanings = [keyword.value for keyword in node.keywords if keyword.arg == "meaning"] or node.args[2:3]
            literals = [n.value for meaning in meanings for n in ast.walk(meaning) if isinstance(n, ast.Constant)]
            yield from ((text, f"{path.name}:{node.lineno}") for text in literals if isinstance(text, str))


def test_every_text_is_asserted_by_a_test():
    """In full: a text of which a test asserts some letters may say anything else."""
    tests = [path for path in Path(__file__).parent.rglob("*.py") if path.name != "refusals.py"]
    nodes = [node for path in tests for node in ast.walk(ast.parse(path.read_text()))]
    asserted = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    asserted |= {re.sub(r"\\(\W)", r"\1", text) for text in asserted}  # regular expressions
    texts = list(texts_of({error.__name__ for error in ERRORS}))
    missing = [where for text, where in texts if not any(text in whole for whole in asserted)]
    assert len(texts) > 30
    assert missing == []


@pytest.mark.parametrize("error_class", ERRORS)
def test_errors_travel_whole(error_class):
    error = error_class("`size` is 3.5.", "It must be at most 2.", "It is large.", "Make it small.")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is error_class
        assert str(other) == str(error) == "`size` is 3.5. It must be at most 2. It is large. Make it small."
        assert vars(other) == vars(error)
    assert isinstance(error, dif.DifError)
    assert isinstance(error, ValueError)
