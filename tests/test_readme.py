"""The README's map names every source file once, with the phrase of its module header."""

import ast
from pathlib import Path

PROJECT = Path(__file__).parents[1]
FOLDERS = ("search_spaces", "rlhf", "rlhf/wrappers", "objectives", "objectives/wrappers", "sweep", "scripts")


def test_map_is_the_module_headers() -> None:
    expected = []
    for path in (path for folder in FOLDERS for path in sorted((PROJECT / folder).glob("*.py"))):
        header = ast.get_docstring(ast.parse(path.read_text())) or ""
        expected.append(f"| `{path.relative_to(PROJECT)}` | {header.splitlines()[0].rstrip('.')} |")
    listed = [
        line for line in (PROJECT / "README.md").read_text().splitlines() if line.startswith("| `") and ".py`" in line
    ]
    assert listed == expected


def test_set_up_commands_come_first() -> None:
    lines = (PROJECT / "README.md").read_text().splitlines()
    assert lines[2].split("#")[0].strip() == "make sweep"
    assert lines[3].split("#")[0].strip() == "make test"
