"""``scripts/measure_size.py`` counts what it says."""

from __future__ import annotations

import runpy
from pathlib import Path, PurePosixPath

from support.pages import TESTS

SCRIPT = runpy.run_path(str(TESTS.parent / "scripts" / "measure_size.py"))
FILES = {
    "README.md": "three words here\n",
    "docs/guide.md": "two words\n",
    "fsdp_overlap/__init__.py": '__all__ = ["Unit"]\n\n\nclass Unit:\n    pass\n',
    "fsdp_overlap/engine/__init__.py": "",
    "fsdp_overlap/engine/unit.py": "class Unit:\n    def run(self): ...\n",
    "fsdp_overlap/tools/cli/main.py": "def main():\n" + "    print()\n" * 81,
    "fsdp_overlap/optim/__init__.py": '__all__ = ["Muon"]\n',
}


def test_each_measure_counts_what_its_name_says(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "docs" / "data.json").write_text("not measured")
    files = SCRIPT["read_tree"](tmp_path)
    assert files == {PurePosixPath(name): text for name, text in FILES.items()}
    assert SCRIPT["measure"](files) == {
        "package: lines": 90,
        "package: files": 5,
        "core: lines": 8,
        "engine: files": 3,
        "class names of several modules": 1,
        "functions above 80 lines": 1,
        "public names": 2,
        "documents: words": 5,
    }
    assert SCRIPT["public_names"](files) == {"fsdp_overlap.Unit", "fsdp_overlap.optim.Muon"}


def test_states_stand_side_by_side() -> None:
    table = SCRIPT["table_of"]({"v1": {"lines": 2000}, "now": {"lines": 1000}})
    assert table == "|  | v1 | now |\n| --- | ---: | ---: |\n| lines | 2,000 | 1,000 |"
