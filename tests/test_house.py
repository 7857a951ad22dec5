"""The figures of the house hold: its size, what a forward enters, and that its wings import one way."""

import ast

import house


def test_the_house_is_no_larger_than_it_was(capsys):
    """A limit above its goal is where the house stands: it may fall only."""
    found = house.figures()
    with capsys.disabled():
        print(f"\n{house.table()}")
    above = {name: (value, house.LIMITS[name][0]) for name, value in found.items() if value > house.LIMITS[name][0]}
    assert above == {}, "now, and at most"


def test_wings_import_one_way():
    assert house.arrows_up() == []


def test_the_hub_set_names_neither_the_package_nor_a_kernel():
    for path in (house.PACKAGE / "transfo_xl").glob("*_transfo_xl*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {name.split(".")[0] for name in names} & {"txl_hf", "triton"}, path.name
            assert not isinstance(node, ast.ImportFrom) or node.level < 2, path.name
        assert "/proc/cpuinfo" not in text and "mkldnn" not in text
