"""Makes wheels: small ones for tests, and wheels of packages from their installed files."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from srunddp.stage.build import own_requirements

_COMMAND = "def main():\n    import sys\n    print('{name} {version} under', sys.prefix)\n"


_UV = {
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
}
_UV["cert"] = "SSL_CERT_FILE"


def uv_settings() -> dict[str, str]:
    """Return pip's settings of indexes and certificates on this machine as variables for uv, which
    does not read pip's configuration.
    """
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    found = re.findall(r"^[^=]*\.([\w-]+)='(.*)'$", shown, re.MULTILINE)
    return {_UV[name]: value for name, value in found if name in _UV}


def wheel(
    folder: Path, name: str, version: str = "1.0", *, requires: tuple[str, ...] = (), text: str = ""
) -> Path:
    """Make the wheel of a package that has one module, and a command of the same name.

    Args:
        folder: The folder of the wheel, which is made if it is missing.
        name: The name of the package, the module and the command.
        version: The package's version.
        requires: What the package requires.
        text: The text of the module; if empty, the command prints its version and ``sys.prefix``.

    Returns:
        The path of the wheel.
    """
    files = {
        f"{name}.py": (text or _COMMAND.format(name=name, version=version)).encode(),
        f"{name}-{version}.dist-info/entry_points.txt": (
            f"[console_scripts]\n{name} = {name}:main\n".encode()
        ),
    }
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    return _zipped(
        folder / f"{name}-{version}-py3-none-any.whl",
        f"{name}-{version}.dist-info",
        metadata,
        files,
    )


def _zipped(
    path: Path,
    facts: str,
    metadata: str,
    files: Mapping[str, bytes],
    tags: str = "Tag: py3-none-any\n",
) -> Path:
    whole = {
        **files,
        f"{facts}/METADATA": metadata.encode(),
        f"{facts}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n{tags}".encode()
        ),
    }
    whole[f"{facts}/RECORD"] = "".join(
        f"{name},,\n" for name in (*whole, f"{facts}/RECORD")
    ).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(whole.items()):
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data)
    return path


def own_packages() -> set[str]:
    """Return the names of all packages that srunddp needs, directly or through other packages,
    except torch.
    """
    names: set[str] = set()
    waiting = own_requirements()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in names or (requirement.marker and not requirement.marker.evaluate()):
            continue
        names.add(name)
        waiting += distribution(name).requires or []
    return names


def own_wheels(folder: Path) -> None:
    """Make wheels of all packages that srunddp needs, except torch, from what is installed here."""
    for name in own_packages():
        _again(folder, name)


def _again(folder: Path, name: str) -> None:
    found = distribution(name)
    facts = next(str(path.parent) for path in found.files or () if path.name == "METADATA")
    kept = [path for path in found.files or () if ".." not in path.parts and path.suffix != ".pyc"]
    files = {
        str(path): path.read_binary() for path in kept if not str(path).startswith(f"{facts}/")
    }
    entries = found.read_text("entry_points.txt")
    if entries:
        files[f"{facts}/entry_points.txt"] = entries.encode()
    tags = "".join(
        line + "\n"
        for line in (found.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag:")
    )
    tag = tags.split()[1]
    path = folder / f"{facts.removesuffix('.dist-info')}-{tag}.whl"
    _zipped(path, facts, found.read_text("METADATA") or "", files, tags)


BACKEND = """
import zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    facts = "source-2.0.dist-info"
    with zipfile.ZipFile(wheel_directory + "/source-2.0-py3-none-any.whl", "w") as archive:
        archive.writestr("source.py", "")
        text = "Metadata-Version: 2.1\\nName: source\\nVersion: 2.0\\n"
        archive.writestr(facts + "/METADATA", text)
        text = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        archive.writestr(facts + "/WHEEL", text)
        archive.writestr(facts + "/RECORD", "source.py,,\\n")
    return "source-2.0-py3-none-any.whl"
"""


def source(folder: Path) -> Path:
    """Make the source archive of a package that has no wheel, and return its path. Building the
    package needs no other package.
    """
    files = {
        "pyproject.toml": (
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        ),
        "backend.py": BACKEND,
        "PKG-INFO": "Metadata-Version: 2.1\nName: source\nVersion: 2.0\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "source-2.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"source-2.0/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return path
