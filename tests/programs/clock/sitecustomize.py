"""A node whose clock is 30 s ahead, as far as Python asks; Python imports this by its name when it
starts.
"""

import time

_right = time.time
time.time = lambda: _right() + 30.0
