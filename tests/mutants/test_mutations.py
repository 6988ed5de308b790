"""Which changes of a source file are made, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.mutants.areas import AREAS, area_of, draw, nearest_tests
from tests.mutants.equivalents import read_equivalents, to_yaml
from tests.mutants.mutations import Mutation, Place, find_mutations


def mutations(folder: Path, source: str) -> list[Mutation]:
    (folder / "module.py").write_text(source)
    return find_mutations(folder, "module.py")


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("a < b", ["a <= b"]),
        ("a <= b < c", ["a < b < c", "a <= b <= c"]),
        ("(a) == (b)", ["(a) != (b)"]),
        ("a not in b", ["a in b"]),
        ("a is b", ["a is not b"]),
        ("a and b", ["(a or b)"]),
        ("x or a and b or c", ["(x and a and b and c)", "x or (a or b) or c"]),
        ("not (a or b)", ["(a or b)", "not ((a and b))"]),
        ("x = a + b * c", ["x = (a - b * c)", "x = a + (b + c)"]),
        ("a // b", ["(a * b)"]),
        ("a += b", ["a -= b"]),
        ("a = 16", ["a = 17"]),
        ("a = 2.5", ["a = 0.0"]),
        ("a = 0.0", ["a = 1.0"]),
        ("a = True", ["a = False"]),
        ("x = a if c else b", ["x = ((b) if c else (a))"]),
        ("close(\n    file\n)", ["pass"]),
        ("def f():\n    return a", ["return None"]),
        ("try:\n    f\nexcept E:\n    g\n    h", ["raise"]),
        ("with suppress(E, F):\n    g", ["with suppress():"]),
    ],
)
def test_each_kind_of_change(code: str, changed: list[str], tmp_path: Path) -> None:
    assert sorted(each.after for each in mutations(tmp_path, code)) == sorted(changed)
    assert all(each.is_python(code.encode()) for each in mutations(tmp_path, code))


@pytest.mark.parametrize(
    "code",
    [
        '"""A docstring with 1 < 2."""',
        "a: Literal[1, 2]",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        'f"{a + 1} of {b or c}"',
        "if TYPE_CHECKING:\n    f(1)",
        "if __name__ == '__main__':\n    f(1)",
        "__slots__ = ('a', *b[1:])",
        "@dataclass(frozen=True)\nclass A: ...",
        "found = 'a text' if one else 'another text'",
        "text = 'a' + b",
        "assert a is not None",
        "file = self.folder / name",
        "Port = int | None",
        "def f():\n    return None",
        "try:\n    f\nexcept E:\n    raise",
    ],
)
def test_what_people_and_type_checkers_read_is_left_alone(code: str, tmp_path: Path) -> None:
    assert mutations(tmp_path, code) == []


def test_a_change_leaves_every_other_byte_as_it_is(tmp_path: Path) -> None:
    source = (
        '# é\ndef f(a, b):\n    """Ünïcode."""\n    x = "ß" if a else b  # ☃\n    return (\n       '
        " a <\n        b)\n"
    )
    for mutation in mutations(tmp_path, source):
        before = source.encode()
        after = mutation.apply(source.encode())
        assert after != before
        assert after.startswith(before[: mutation.start])
        assert after.endswith(before[mutation.end :])
        assert mutation.function == "f"
        assert mutation.is_python(source.encode())


def test_a_place_has_no_line_number_and_names_one_change(tmp_path: Path) -> None:
    source = "class A:\n    def f(self):\n        a(1)\n        a(1)\n"
    found = mutations(tmp_path, source)
    assert [(each.place, each.line) for each in found] == [
        (Place("module.py", "A.f", "a(1)", "pass"), 3),
        (Place("module.py", "A.f", "a(1)", "a(2)"), 3),
    ]
    moved = mutations(tmp_path, f"\n\n{source}")
    assert [each.place for each in moved] == [each.place for each in found]


SMALL = [area for area in AREAS if area.folder.startswith("srunddp/train/")]


def first(count: int, seed: int) -> list[Mutation]:
    drawn = draw(ROOT, seed, SMALL)
    return [next(drawn) for _ in range(count)]


def test_a_seed_gives_the_same_mutants_of_all_areas_in_turn() -> None:
    drawn = first(12, seed=5)
    assert first(18, seed=5)[:12] == drawn
    assert first(12, seed=6) != drawn
    assert [area_of(each.file) for each in drawn] == SMALL * 6


def test_the_nearest_tests_are_there_and_the_file_of_the_same_name_is_first() -> None:
    (first_set, *others) = nearest_tests(ROOT, "srunddp/spare_nodes/lease.py")
    assert first_set.paths == ("tests/spare_nodes/test_lease.py",)
    assert others == list(area_of("srunddp/spare_nodes/lease.py").tests)
    assert nearest_tests(ROOT, "srunddp/spare_nodes/spare_nodes.py")[0].paths != first_set.paths
    for area in AREAS:
        assert (ROOT / area.folder).is_dir()
        for tests in area.tests:
            assert all((ROOT / path).exists() for path in tests.paths)


def test_each_equivalent_mutant_is_one_and_has_a_reason() -> None:
    """One of code that has changed is to be looked at again."""
    for place, reason in read_equivalents().items():
        assert place in {each.place for each in find_mutations(ROOT, place.file)}, place
        assert reason


def test_a_survivor_is_printed_as_an_entry_of_the_file_of_equivalents(tmp_path: Path) -> None:
    file = tmp_path / "equivalent.yaml"
    place = Place("a.py", "A.f", "if a:\n    b", "if not a: # 'c'\n    b")
    file.write_text(to_yaml(place))
    with pytest.raises(ValueError, match="no reason for"):
        read_equivalents(file)
    file.write_text(to_yaml(place).replace("reason: ''", "reason: a and b are the same"))
    assert read_equivalents(file) == {place: "a and b are the same"}
