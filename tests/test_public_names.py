"""A public function or class has one name, one meaning and a user.

Constants are values of their module and may repeat; so may the names in tables of families, which are alike on purpose.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import ckptfs

ROOT = Path(ckptfs.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}
TWINS = {
    "command": "each module of cli has one, named after the module",
    "main": "what a program starts with",
    "answer": "what a worker process does with a request",
    "serve": "the loop of a process",
    "start": "of a worker process, of threads",
    **dict.fromkeys(("attribute", "dataspace", "datatype"), "encode and decode of one HDF5 message"),
    **dict.fromkeys(("fill_rows", "fill_range"), "compressed and uncompressed chunks"),
    "transpose": "the loop in C, and its program",
    "check": "of a checkpoint, from Python; of the machine",
    **dict.fromkeys(
        ("attribute_value", "object_record", "open_file", "root_attributes", "walk_objects"),
        "libhdf5 finds what the walker finds",
    ),
}
"""Names that are the same on purpose, with the reason."""
SEVERAL_MEANINGS = {
    "model_state": "the state of a source, and of a file",
    **dict.fromkeys(("Entry", "Leaf", "Link"), "a folder of vfs, and other trees"),
    **dict.fromkeys(("Change", "Converted", "Step", "step", "upgraded"), "a release step, its rules and its result"),
    **dict.fromkeys(
        ("Rule", "When", "Claim", "Fields", "under", "renamed", "without"), "rules of tensors and of configs"
    ),
    **dict.fromkeys(("config_as", "changed_config", "steps_of"), "conversion of configs, and of one kind of them"),
    **dict.fromkeys(("Record", "Kind", "State", "key_metadata", "state_of"), "file formats, each with its own"),
    **dict.fromkeys(("Progress", "data_nbytes", "nbytes"), "tools that count bytes"),
    **dict.fromkeys(("components", "flat", "filled", "size"), "short words of several rooms"),
    **dict.fromkeys(("describe", "opened"), "short words of several rooms"),
}
"""Names that want another one. The list only gets shorter."""
FOR_TESTS = {
    "api.mount.serve_request": "started by a line of code in a process of its own",
    "conversion.releases.config.upgraded_config": "a whole config from one release to the next",
    "conversion.resolve.convert_config": "a config without a checkpoint",
    "vfs.names.unescape": "the inverse of a rule that is documented",
}
"""Public names that nothing but tests reads, with the reason. The list only gets shorter."""


def defined(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and names of types at the top of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        of_types = isinstance(node, ast.Assign | ast.AnnAssign)
        yield from (n for n in names if n[0] != "_" and not (of_types and (n.isupper() or n[0].islower())))


def homes() -> dict[str, list[str]]:
    """Name to the modules that define it, families apart."""
    found = defaultdict(list)
    for module, tree in MODULES.items():
        if not module.startswith("conversion.families."):
            for name in defined(tree):
                found[name].append(module)
    return found


def used(tree: ast.Module) -> set[str]:
    """Names that a module reads, wherever it does; words of strings, too, for what is started by name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return found


def test_a_public_name_has_one_home() -> None:
    twice = {name: modules for name, modules in homes().items() if len(modules) > 1}
    known = TWINS.keys() | SEVERAL_MEANINGS.keys()
    assert {name: modules for name, modules in twice.items() if name not in known} == {}
    assert sorted(known - twice.keys()) == [], "no longer twice: take it off the list"


def installed_commands() -> set[str]:
    """Functions that ``project.scripts`` of pyproject.toml names."""
    return set(
        re.findall(r'^[\w-]+ = "ckptfs\.[\w.]+:(\w+)"', (ROOT.parent / "pyproject.toml").read_text(), re.MULTILINE)
    )


def test_what_is_public_is_used() -> None:
    scripts = [ast.parse(path.read_text()) for path in (ROOT.parent / "scripts").rglob("*.py")]
    names = set().union(*map(used, [*MODULES.values(), *scripts])) | installed_commands()
    found = {f"{module}.{name}" for module, tree in MODULES.items() for name in defined(tree) if name not in names}
    assert sorted(found - FOR_TESTS.keys()) == []
    assert sorted(FOR_TESTS.keys() - found) == [], "used now: take it off the list"
