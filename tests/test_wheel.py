"""The wheel, in an environment of its own, far from the repository."""

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_an_installed_wheel_scores_a_file_outside_the_repository(tmp_path):
    def run(*command, **options):
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run(sys.executable, "-m", "build", ROOT, "--outdir", tmp_path)  # the wheel out of the source archive
    (wheel,) = tmp_path.glob("directional_influence-*.whl")
    (archive,) = tmp_path.glob("directional_influence-*.tar.gz")
    assert archive.stat().st_size < 10_000_000
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as inside:
        assert "dif/py.typed" in inside.namelist()
        assert not [name for name in inside.namelist() if not name.startswith(("dif/", "directional_influence-"))]
    run(sys.executable, "-m", "venv", tmp_path / "env")
    run(tmp_path / "env" / "bin" / "pip", "install", "--no-deps", wheel)
    # what dif depends on is taken from here, dif itself is not: .pth files beside it are not read
    clean = {"PATH": "/usr/bin:/bin", "PYTHONPATH": sysconfig.get_paths()["purelib"], "HOME": str(tmp_path)}
    program, there = tmp_path / "env" / "bin" / "dif", {"cwd": tmp_path, "env": clean}
    where = run(tmp_path / "env" / "bin" / "python", "-c", "import dif; print(dif.__file__)", **there)
    assert where.startswith(str(tmp_path))
    run(program, "init", "mine.py", **there)
    said = json.loads(run(program, "score", "mine.py", "--target", "gap", "--top", "3", "--json", **there))
    assert len(said["samples"]) == 3
    assert (tmp_path / "results" / "report.html").stat().st_size > 10_000
    said = run(program, "demo", "--out", "demo", **there)
    assert str(tmp_path / "demo" / "report.html") in said.splitlines()[-2]
