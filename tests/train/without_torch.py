"""A Python in which torch cannot be imported: a module that needs it fails there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# srunddp.train's own __init__ imports the loop, and so torch.
_BEFORE = f"""
import resource, sys, types
sys.modules["torch"] = None
sys.modules["srunddp.train"] = package = types.ModuleType("srunddp.train")
package.__path__ = [{str(ROOT / "srunddp" / "train")!r}]
"""


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _BEFORE + code], cwd=ROOT, capture_output=True, text=True, timeout=180, check=True
    )
