"""Finds the places of a source file where one small change makes a mutant.

What is only read by people or by a type checker is left alone: docstrings, annotations, the words
of messages, ``if TYPE_CHECKING``. So is what fails at once wherever it is reached, such as a
difference of two texts, as a test that notices it shows little.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
_BOOLEAN: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_NOT_ARITHMETIC = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.ListComp, ast.DictComp)
_NOT_ANNOTATIONS = ("annotation", "returns", "type_params")
# Which `/` joins with a name.
_PATH = re.compile(r"path|folder|root|home|\bdir|_dir\b", re.IGNORECASE)
_MOST_LINES = 12  # of a change, which people are to read


@dataclass(frozen=True)
class Mutation:
    """One change of one source file.

    Attributes:
        file: its path from the root of the tree.
        line: number of the first line that changes.
        function: the qualified name of the function or class that has it; empty for the module.
        kind: of the change.
        start, end: which bytes of the file are replaced.
        replacement: by what.
        before, after: the lines that change, without the indentation that they share.
    """

    file: str
    line: int
    function: str
    kind: str
    start: int
    end: int
    replacement: str
    before: str
    after: str

    @property
    def place(self) -> Place:
        """What the mutation is known by, whatever else of the file changes."""
        return Place(self.file, self.function, self.before, self.after)

    def apply(self, source: bytes) -> bytes:
        """The file with this change."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]

    def is_python(self, source: bytes) -> bool:
        """Whether the file with this change is still Python."""
        try:
            compile(self.apply(source), self.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
        return True


@dataclass(frozen=True)
class Place:
    """A mutation without a line number; see :class:`Mutation` for the attributes."""

    file: str
    function: str
    before: str
    after: str


def find_mutations(root: Path, file: str) -> list[Mutation]:
    """All mutations of a file, in the order of its text; ``file`` is its path from ``root``."""
    source = (root / file).read_bytes()
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    # Two changes that read the same cannot be told apart by their place: the first one stands for
    # both.
    by_place: dict[Place, Mutation] = {}
    for mutation in sorted(finder.found, key=lambda each: (each.start, each.end, each.kind)):
        by_place.setdefault(mutation.place, mutation)
    return list(by_place.values())


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.found: list[Mutation] = []
        self._names: list[str] = []
        self._line_starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]

    # What is only read by people, or by a type checker.

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name not in _NOT_ANNOTATIONS:
                self._visit_field(value)

    def _visit_field(self, value: object) -> None:
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                self.visit(child)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """An f-string is left alone."""

    def visit_If(self, node: ast.If) -> None:
        condition = ast.unparse(node.test)
        if condition in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'"):
            self._visit_field(node.orelse)
        else:
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(
            isinstance(target, ast.Name) and target.id in ("__slots__", "__all__")
            for target in node.targets
        ):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion tells the type checker what is known."""

    # Names of functions and classes.

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        # Not its decorators: of @dataclass(frozen=True) nothing is seen until somebody breaks the
        # promise.
        self._names.append(node.name)
        self._visit_field(node.body)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_field(node.decorator_list)
        self._names.append(node.name)
        self.visit(node.args)
        self._visit_field(node.body)
        self._names.pop()

    # The mutations.

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for (left, right), operator in zip(pairwise(operands), node.ops, strict=True):
            self._exchange_operator("comparison", left, right, _COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator, other = _BOOLEAN[type(node.op)]
        gaps = [(self._end(left), self._start(right)) for left, right in pairwise(node.values)]
        if not any(b"#" in self.source[start:end] for start, end in gaps):
            text = ""
            at = self._start(node)
            for start, end in gaps:
                gap = self.source[start:end].decode()
                text += self.source[at:start].decode() + re.sub(rf"\b{operator}\b", other, gap)
                at = end
            text += self.source[at : self._end(node)].decode()
            self._replace("boolean", node, f"({text})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start = self._start(node)
            rest = self.source[start : self._end(node)].decode().removeprefix("not").lstrip()
            self._add("not", start, self._end(node), rest)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operators = _ARITHMETIC.get(type(node.op))
        if operators and _is_arithmetic(node):
            left = self.source[self._start(node) : self._end(node.left)].decode()
            gap = self.source[self._end(node.left) : self._start(node.right)].decode()
            right = self.source[self._start(node.right) : self._end(node)].decode()
            if "#" not in gap:
                self._replace("arithmetic", node, f"({left}{gap.replace(*operators)}{right})")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        operators = _ARITHMETIC.get(type(node.op))
        if operators and not _is_no_number(node.value):
            self._exchange_operator("arithmetic", node.target, node.value, operators)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace("constant", node, str(node.value + 1))
        elif isinstance(node.value, float):
            # A limit of 31 s is as good as one of 30 s, and one of 0 s is not.
            self._replace("constant", node, "0.0" if node.value else "1.0")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        if not (_is_words(node.body) and _is_words(node.orelse)):
            body, test, other = map(self._text, (node.body, node.test, node.orelse))
            self._replace("conditional", node, f"(({other}) if {test} else ({body}))")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace("call", node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._replace("return", node, "return None")
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        first = node.body[0]
        last = node.body[-1]
        if not (isinstance(first, ast.Raise) and first.exc is None):
            self._add("except", self._start(first), self._end(last), "raise")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and ast.unparse(call.func) in (
                "suppress",
                "contextlib.suppress",
            ):
                self._replace("except", call, f"{ast.unparse(call.func)}()")
        self.generic_visit(node)

    # Text.

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        return self.source[self._start(node) : self._end(node)].decode()

    def _replace(self, kind: str, node: ast.expr | ast.stmt, replacement: str) -> None:
        self._add(kind, self._start(node), self._end(node), replacement)

    def _exchange_operator(
        self, kind: str, left: ast.expr, right: ast.expr, operators: tuple[str, str]
    ) -> None:
        """Replace the operator between two operands, where there may be parentheses as well."""
        start = self._end(left)
        end = self._start(right)
        gap = self.source[start:end].decode()
        operator, other = operators
        if "#" not in gap and gap.count(operator) == 1:
            self._add(kind, start, end, gap.replace(operator, other))

    def _add(self, kind: str, start: int, end: int, replacement: str) -> None:
        first = self.source.rfind(b"\n", 0, start) + 1
        last = self.source.find(b"\n", end)
        last = len(self.source) if last < 0 else last
        before = self.source[first:last].decode()
        after = (self.source[first:start] + replacement.encode() + self.source[end:last]).decode()
        if before.count("\n") >= _MOST_LINES:
            return
        line = self.source.count(b"\n", 0, start) + 1
        function = ".".join(self._names)
        before = _without_indentation(before)
        after = _without_indentation(after)
        self.found.append(
            Mutation(self.file, line, function, kind, start, end, replacement, before, after)
        )


def _is_arithmetic(node: ast.BinOp) -> bool:
    if isinstance(node.op, ast.Div) and _PATH.search(ast.unparse(node.left)):
        return False
    if isinstance(node.op, ast.BitOr) and any(_is_type(each) for each in (node.left, node.right)):
        return False
    return not any(_is_no_number(each) for each in (node.left, node.right))


def _is_no_number(node: ast.expr) -> bool:
    """Whether this is a text, a list or the like, for which another operator is an error."""
    if isinstance(node, ast.BinOp):
        return _is_no_number(node.left) or _is_no_number(node.right)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, _NOT_ARITHMETIC)


def _is_type(node: ast.expr) -> bool:
    """Whether this is a part of a union such as ``int | None``."""
    if isinstance(node, ast.Constant):
        return node.value is None
    names = re.findall(r"\w+", ast.unparse(node))
    return names[-1] in ("int", "float", "str", "bytes", "bool") or isinstance(node, ast.Subscript)


def _is_words(node: ast.expr) -> bool:
    """Whether this is a text for people, which has blanks."""
    if isinstance(node, ast.JoinedStr):
        return any(_is_words(each) for each in node.values)
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (not node.value or " " in node.value)
    )


def _without_indentation(lines: str) -> str:
    return textwrap.dedent(lines).strip("\n")


def find_all(root: Path, folders: Iterable[str]) -> list[Mutation]:
    """The mutations of all modules below these folders of the tree."""
    files: Sequence[str] = [
        str(path.relative_to(root))
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
    ]
    return [mutation for file in files for mutation in find_mutations(root, file)]
