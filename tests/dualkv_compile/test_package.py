"""The wheel: complete, and a working backend for a process that imported nothing but torch."""

from __future__ import annotations

import configparser
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"dualkv_compile": "dualkv_compile", "passes": "dualkv_compile/passes", "kernels": "dualkv_compile/kernels"}
# Read by `import torch`, which must not import the package.
AUTOLOAD = "dualkv_autoload.py"

USES_BACKEND = """
import torch
assert "dualkv" in torch._dynamo.list_backends()
compiled = torch.compile(lambda x: (x * 2).sin(), backend="dualkv")
x = torch.randn(4, 8)
torch.testing.assert_close(compiled(x), (x * 2).sin())
import dualkv_compile
print(dualkv_compile.__file__)
"""


def _run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree: setuptools writes its build folder beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE", "README.md", AUTOLOAD, *FOLDERS):
        if (ROOT / name).exists():
            _run("cp", "-rL", ROOT / name, source / name, cwd=ROOT)
    output = tmp_path_factory.mktemp("wheel")
    # Without build isolation, setuptools is taken from this environment and no network is needed.
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"),
        *("--wheel-dir", output, source),
        cwd=output,
    )
    (built,) = output.glob("dualkv_compile-*.whl")
    return built


def test_wheel_holds_every_module_under_its_installed_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert {"dualkv_compile/py.typed", "dualkv_compile/demo/problems.json"} <= names
    top = {name.split("/")[0] for name in names}
    assert top == {"dualkv_compile", AUTOLOAD, next(name for name in top if name.endswith(".dist-info"))}


def test_wheel_declares_backend_command_and_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
    points = configparser.ConfigParser()
    points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert dict(points["torch_dynamo_backends"]) == {"dualkv": "dualkv_compile.backend:dualkv"}
    assert dict(points["console_scripts"]) == {"dualkv-compile": "dualkv_compile.__main__:main"}
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()


@pytest.mark.slow
def test_installed_wheel_is_found_by_a_process_that_imports_only_torch(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}, scheme="venv"))
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel),
        cwd=tmp_path,
    )
    # A path file adds torch, but is not followed further: our own editable installation stays out of sight.
    (site / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    location = _run(folder / "bin" / "python", "-c", USES_BACKEND, cwd=tmp_path).strip()
    assert Path(location).is_relative_to(site)
