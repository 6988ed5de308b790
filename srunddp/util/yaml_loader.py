"""PyYAML's loader with a limit on how deeply a file may be nested. Only :mod:`yaml_source` imports
this module, and only when it reads a file.
"""

from __future__ import annotations

from typing import Any

import yaml

DEEPEST = 50  # levels. PyYAML recurses at each level, and Python allows about 1,000 nested calls


class BoundedLoader(yaml.SafeLoader):
    """A loader that raises an error, with the position in the file, at a node that is nested more
    than :data:`DEEPEST` levels deep.
    """

    def __init__(self, stream: bytes) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        """Return the next node with the nodes nested in it.

        Raises:
            yaml.MarkedYAMLError: The node is nested too deeply.
        """
        self._depth += 1
        if self._depth > DEEPEST:
            mark: Any = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem=f"nested deeper than {DEEPEST} levels", problem_mark=mark
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node
