"""Runs an example in a stand-in world, so that this folder's tests need no launcher."""

from __future__ import annotations

import runpy
import sys

import srunddp
import srunddp.train
from tests.train.worlds import joined

if __name__ == "__main__":
    srunddp.init = joined
    srunddp.Trainer = srunddp.train.Trainer
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
