"""The fuzz tests' profile: CI tries the same inputs each time, a developer's machine new ones."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("srunddp", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("srunddp")
