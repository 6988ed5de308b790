"""``srunddp`` whose supervisor has other limits than usual: ``limited.py LIMITS [OPTIONS] SCRIPT``.

LIMITS are those fields of :class:`srunddp.supervisor.limits.Limits` that differ, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.remove(str(Path(__file__).resolve().parent))

from srunddp.cli import main
from srunddp.supervisor.limits import Limits

main(sys.argv[2:], obj=Limits(**json.loads(sys.argv[1])))
