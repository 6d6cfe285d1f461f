"""The rooms of the package import one another in one direction only, as ARCHITECTURE.md draws it."""

import ast
from pathlib import Path

from conftest import LONGEST, NIGHTLY, QUICK

PACKAGE = Path(__file__).parent.parent / "openquant"
# Without the module that a build writes.
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_version.py")
# From the ground up: a module may import from its own room, and from every floor below.
FLOORS = (
    ("errors", "version"),
    ("machine", "patterns"),
    ("registry", "threads"),
    ("files", "models"),
    ("formats",),
    ("fields", "packed", "weights"),
    ("gguf", "options"),
    ("data", "hub", "plan"),
    ("convert", "distributed"),
    ("recipes", "result", "streaming"),
    ("diagnosis", "job"),
    ("calibration", "evaluation"),
    ("fit", "verification"),
    ("report",),
    ("run",),
    ("api",),
    ("web",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """The rooms that a module imports from, inside of functions and for type checkers too."""
    depth, found = len(path.relative_to(PACKAGE).parts), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("openquant"):
            found.add(f"{node.module} by its full name")
    return found - {"_version"}


def test_imports_go_one_way():
    backward = [
        f"{path.relative_to(PACKAGE)} imports {room}"
        for path in MODULES
        for room in sorted(imported(path))
        if room not in FLOOR or (FLOOR[room] >= FLOOR[room_of(path)] and room != room_of(path))
    ]
    assert backward == []
    assert {room_of(path) for path in MODULES} <= FLOOR.keys()


def test_the_floors_are_those_that_are_drawn():
    drawn = (PACKAGE.parent / "ARCHITECTURE.md").read_text().split("Imports go one way:")[1].split("```")[1]
    floors = [tuple(floor.replace(",", " ").split()) for floor in drawn.split("<")]
    rooms = {room_of(path) for path in MODULES} - {"__init__", "__main__"}
    held = [tuple(room for room in floor if room in rooms) for floor in FLOORS]
    assert floors == [floor for floor in held if floor]


def test_what_lists_of_tests_name_exists():
    tests = Path(__file__).parent
    named = {name.partition("::")[0] for name in (*QUICK, *LONGEST, *NIGHTLY)}
    assert {name for name in named if not (tests / name).is_file()} == set()


def test_no_two_test_modules_have_one_name():
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    assert {path.name for path in paths if [other.name for other in paths].count(path.name) > 1} == set()


# Twins with the same meaning: loops in numpy, numba and torch; a script's or a process's entry point.
SHARED = {
    *("absmax", "best_scales", "decode", "decode_rows", "encode", "encode_stored", "scales"),
    *("compress_main", "main", "round_panel", "signs", "to_bfloat16"),
}


def test_no_public_name_means_two_things():
    defined: dict[str, list[Path]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(path)
    assert {name for name, paths in defined.items() if len(paths) > 1} - SHARED == set()
