"""The tree is the pipeline: README's tree, the docstrings and the imports agree."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["extract.py", "train.py", "evaluate.py"]
MODULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "eagle3").rglob("*.py") if path.name != "__init__.py")

# What each part may import besides itself, SPOKEN_EVERYWHERE and libraries.
ALLOWED = {
    "__main__": set(),  # but for the subcommands, which it imports when they are called
    "config": set(),
    "config_file": set(),
    "cli": set(),
    "loading": set(),
    "files": set(),
    "words": set(),
    "board": set(),
    "tracking": {"board"},
    "plan": {"features"},
    "commands": {"prompts", "capture", "training", "evaluation", "features"},
    "prompts": set(),
    "capture": {"prompts", "features", "plan", "board", "tracking"},
    "features": set(),
    "draft": {"features"},
    "training": {"features", "draft", "board", "tracking"},
    "evaluation": {"prompts", "features", "draft", "capture.server", "board", "tracking"},
}
# One module may import more than its package.
ALLOWED_MODULES = {
    "capture.parity": {"draft.target_weights"},
    "capture.importing": {"draft.target_weights"},
    "capture.inprocess": {"draft.whole_target"},
    "evaluation.simulate": {"training.packs", "training.prefetch"},
    "features.making": {"capture.foreign", "capture.importing"},
    "training.inputs": {"prompts.tokenizers"},
}
SPOKEN_EVERYWHERE = {"config", "config_file", "cli", "files", "loading", "words"}


def readme_tree() -> dict[str, str]:
    """Returns path -> purpose, from the README's tree block."""
    block = re.search(r"```text\n(extract\.py.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None, "README.md must hold the tree in a ```text block that starts with extract.py"
    tree: dict[str, str] = {}
    folders: list[str] = []
    for line in block[1].splitlines():
        match = re.match(r"( *)(\S+)\s+(.+)", line)
        assert match is not None, line
        indent, name, purpose = len(match[1]) // 2, match[2], match[3]
        folders = folders[:indent]
        if name.endswith("/"):
            folders.append(name)
        else:
            tree["".join(folders) + name] = purpose.strip()
    return tree


def docstring_line(path: str) -> str:
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    assert docstring, f"{path} must open with a docstring"
    return docstring.splitlines()[0]


def imported_modules(path: str) -> set[str]:
    """Returns the modules of ours that a file imports, without the leading `eagle3.`."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports must be absolute"
            # `from eagle3 import x` may import the module x.
            names = [f"eagle3.{alias.name}" for alias in node.names] if node.module == "eagle3" else [node.module or ""]
            found |= set(names)
    return {name.removeprefix("eagle3.") for name in found if name.startswith("eagle3.")}


def test_readme_tree_is_the_tree() -> None:
    assert sorted(readme_tree()) == sorted([*SCRIPTS, *MODULES])


@pytest.mark.parametrize("path", [*SCRIPTS, *MODULES])
def test_docstring_opens_with_its_line_in_the_tree(path: str) -> None:
    line = docstring_line(path)
    purpose = readme_tree()[path]
    assert line.rstrip(".").casefold() == purpose.rstrip(".").casefold()


@pytest.mark.parametrize("path", MODULES)
def test_imports_go_down_the_layers(path: str) -> None:
    module = path.removeprefix("eagle3/").removesuffix(".py").replace("/", ".")
    part = module.split(".")[0]
    allowed = ALLOWED[part] | ALLOWED_MODULES.get(module, set()) | SPOKEN_EVERYWHERE | {part}
    for name in imported_modules(path):
        prefixes = {name, name.split(".")[0]}
        assert prefixes & allowed, f"{path} must not import eagle3.{name}; allowed: {sorted(allowed)}"


@pytest.mark.parametrize("path", MODULES)
def test_sglang_is_imported_by_the_plugin_only(path: str) -> None:
    if path in ("eagle3/capture/plugin.py", "eagle3/capture/guard.py"):
        return
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "sglang" for alias in node.names), path
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] != "sglang", path


@pytest.mark.parametrize("path", sorted(str(p.relative_to(ROOT)) for p in (ROOT / "eagle3").rglob("__init__.py")))
def test_init_files_hold_a_docstring_only(path: str) -> None:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    assert len(body) == 1, path
    assert ast.get_docstring(ast.Module(body=body, type_ignores=[])), path
