"""Finds out from a script's text whether importing it would call MPI."""

import ast


def uses_mpi_when_imported(text: str) -> bool:
    """Return whether importing the script would call MPI.

    Only code counts that is outside of functions and of ``if __name__ == "__main__":``. There, a
    call and a property such as ``comm.rank`` count as calls of MPI; importing mpi4py.MPI and naming
    its contents, as in ``comm = MPI.COMM_WORLD``, do not.

    Args:
        text: The source of the script. For a text that is not Python the result is False.
    """
    try:
        script = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    reader = _TopLevel()
    reader.visit(script)
    return reader.uses_mpi


class _TopLevel(ast.NodeVisitor):
    """Visits the statements that an import executes, and sets ``uses_mpi`` if one calls MPI."""

    def __init__(self) -> None:
        self.uses_mpi = False
        self._names: set[str] = set()  # the names of mpi4py, its modules and MPI's constants

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "mpi4py":
                self._names.add(alias.asname or "mpi4py")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").split(".")[0] == "mpi4py":
            self._names.update(alias.asname or alias.name for alias in node.names)

    def visit_Assign(self, node: ast.Assign) -> None:
        # comm = MPI.COMM_WORLD is not a call, but a later use of comm may be one.
        if self._is_constant(node.value):
            self._names.update(each.id for each in node.targets if isinstance(each, ast.Name))
        else:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if not _asks_for_name(node.test):
            self.generic_visit(node)

    # Do not visit the bodies of functions: an import defines them without calling them.
    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        pass

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        pass

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass

    def visit_Name(self, node: ast.Name) -> None:
        self.uses_mpi = self.uses_mpi or node.id in self._names

    def _is_constant(self, node: ast.expr) -> bool:
        """Return whether an expression only names a constant of MPI, or a module of mpi4py.

        The names of MPI's constants are in capital letters.
        """
        while isinstance(node, ast.Attribute) and node.attr.isupper():
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._names


def _asks_for_name(test: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(test))
