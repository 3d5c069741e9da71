"""The promises of the project as a whole: what importing costs, what is public, what the repository holds."""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import inspect
import itertools
import json
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import kvformat
import kvformat.errors
import kvformat.extract
from kvformat.codes import CODES
from kvformat.errors import KVFormatError, KVFormatWarning, make_error

REPOSITORY = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGE = REPOSITORY / "kvformat"
MODULES = sorted(path.relative_to(REPOSITORY).as_posix() for path in PACKAGE.rglob("*.py"))
HEAVY = {"fsspec", "grpc", "safetensors", "torch", "transformers"}
MIB = 1 << 20

# --------------------------------------------------------------------------------------------- what importing costs


def loaded_by(code: str) -> tuple[set[str], str]:
    """Top-level modules a fresh interpreter holds after ``code``, and what it printed. Warnings are errors there."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=REPOSITORY,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    printed, _, last = done.stdout.rstrip("\n").rpartition("\n")
    return set(json.loads(last)), printed


def test_the_probe_sees_what_is_loaded() -> None:
    assert "safetensors" in loaded_by("import safetensors")[0] & HEAVY


def test_import_loads_nothing_heavy() -> None:
    loaded, printed = loaded_by("import sys, kvformat; dir(kvformat); assert 'kvformat.testing' not in sys.modules")
    assert "kvformat" in loaded
    assert loaded & HEAVY == set()
    assert printed == ""


def test_extraction_is_reached_through_the_package_and_loads_no_model_library() -> None:
    """In an interpreter of its own: whoever imports the submodule makes the attribute exist."""
    before = "import sys, kvformat; assert 'kvformat.extract' not in sys.modules"
    loaded, printed = loaded_by(f"{before}; print(kvformat.extract.run.__name__)")
    assert printed == "run"
    assert loaded & HEAVY == set()


HELP_AS_MODULE = """
import runpy, sys
sys.argv = ["kvformat", *ARGUMENTS]
try:
    runpy.run_module("kvformat", run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    assert not leaving.code, leaving.code
"""
HELP_AS_SCRIPT = """
import importlib, sys
sys.argv = ["kvformat", *ARGUMENTS]
module, _, function = SCRIPT.partition(":")
try:
    result = getattr(importlib.import_module(module), function)()
    assert not result, result
except SystemExit as leaving:
    assert not leaving.code, leaving.code
"""


@pytest.mark.parametrize("how", [HELP_AS_MODULE, HELP_AS_SCRIPT], ids=["python -m kvformat", "kvformat"])
def test_help_loads_neither_torch_nor_transformers(how: str) -> None:
    given = f"ARGUMENTS = ['--help']; SCRIPT = {PROJECT['scripts']['kvformat']!r}"
    loaded, printed = loaded_by(f"{given}\n{how}")
    assert loaded & {"grpc", "torch", "transformers"} == set()
    for command in ("extract", "estimate", "inspect", "verify", "diff", "status", "clean"):
        assert re.search(rf"\b{command}\b", printed), f"{command} is not in the help"


# ------------------------------------------------------------------------------------------------------- public names


PACKAGES = [kvformat, kvformat.extract]
PUBLIC = [(package, name) for package in PACKAGES for name in package.__all__ if name != "__version__"]
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
each_name = pytest.mark.parametrize(
    ("package", "name"), PUBLIC, ids=[f"{package.__name__}.{name}" for package, name in PUBLIC]
)


def description(package: ModuleType, name: str) -> str | None:
    """The docstring of a public name itself, not an inherited one; of an alias, the one below it."""
    value = getattr(package, name)
    if inspect.isclass(value):
        return vars(value).get("__doc__")
    if inspect.isroutine(value) or inspect.ismodule(value):
        return value.__doc__
    tree = ast.parse(inspect.getsource(package))
    (module,) = (
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]
    )
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    for node, below in itertools.pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found = below.value if isinstance(below, ast.Expr) else None
            return found.value if isinstance(found, ast.Constant) and isinstance(found.value, str) else None
    return None


@each_package
def test_public_names_are_sorted_and_unique(package: ModuleType) -> None:
    assert package.__all__
    assert list(package.__all__) == sorted(set(package.__all__))
    assert set(package.__all__) <= set(dir(package))


@each_name
def test_public_name_exists_and_is_documented(package: ModuleType, name: str) -> None:
    assert description(package, name), "no docstring of its own"


@each_name
def test_public_name_is_typed(package: ModuleType, name: str) -> None:
    value = getattr(package, name)
    members = vars(value).items() if inspect.isclass(value) else [(name, value)]
    functions = [
        (member, function.__func__ if isinstance(function, classmethod | staticmethod) else function)
        for member, function in ((one, found.fget if isinstance(found, property) else found) for one, found in members)
        if not member.startswith("_") or member == "__init__"
    ]
    untyped = {
        f"{member}({', '.join(parameters)})"
        for member, function in functions
        if inspect.isfunction(function)
        and function.__module__.startswith("kvformat.")  # a protocol gets an __init__ of typing's
        and (
            parameters := [
                one
                for one in [*inspect.signature(function).parameters, "return"]
                if one not in {"self", "cls", *function.__annotations__}
            ]
        )
    }
    assert untyped == set()


@each_name
def test_public_struct_describes_what_it_inherits(package: ModuleType, name: str) -> None:
    """Whoever reads its help sees the fields of a base that is not public nowhere else."""
    fields = getattr(getattr(package, name), "__struct_fields__", ())
    inherited = set(fields) - set(vars(getattr(package, name)).get("__annotations__", {}))
    words = set(re.findall(r"\w+", description(package, name) or ""))
    assert inherited - words == set()


@each_package
def test_a_star_import_gives_the_public_names(package: ModuleType) -> None:
    namespace: dict[str, object] = {}
    exec(f"from {package.__name__} import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(package.__all__)


@each_package
def test_an_unknown_name_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


@pytest.mark.parametrize("module", MODULES)
def test_module_is_documented_and_says_what_it_exports(module: str) -> None:
    tree = ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no docstring"
    if len(tree.body) == 1:
        return
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    targets = [
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    assert "__all__" in targets or Path(module).name == "__main__.py", "no __all__"


@pytest.mark.parametrize(
    "module", [name for name in MODULES if name.startswith(("kvformat/spec/", "kvformat/codec/"))]
)
def test_pure_module_opens_no_file(module: str) -> None:
    """The import rules keep the modules that do I/O out; this keeps the builtins out."""
    tree = ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))
    called = {
        node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called & {"open", "print", "input", "exec", "eval", "__import__"} == set()


# -------------------------------------------------------------------------------------------------------- import rules

VIOLATIONS = [
    ("layers", "codes.py", "import kvformat.spec.limits"),
    ("layers", "errors.py", "import kvformat.testing"),
    ("storage", "storage/__init__.py", "import kvformat.spec.limits"),
    ("pure", "codec/__init__.py", "import mmap"),
    ("torch", "codes.py", "import torch"),
    ("transformers", "extract/__init__.py", "import transformers"),
    ("fsspec", "extract/__init__.py", "import fsspec"),
    ("grpc", "storage/__init__.py", "import grpc"),
]


def test_every_import_rule_is_shown_to_bite() -> None:
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert [contract["id"] for contract in config["tool"]["importlinter"]["contracts"]] == list(
        dict.fromkeys(contract for contract, _, _ in VIOLATIONS)
    )


@pytest.mark.parametrize(("contract", "module", "statement"), VIOLATIONS)
def test_import_rule_bites(contract: str, module: str, statement: str, tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "kvformat", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    lint = [
        sys.executable,
        "-c",
        "import sys; from importlinter.cli import lint_imports_command as lint; sys.path.insert(0, '.'); lint()",
        "--no-cache",
        "--contract",
        contract,
    ]

    def verdict() -> subprocess.CompletedProcess[str]:
        return subprocess.run(lint, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    before = verdict()
    assert before.returncode == 0, before.stdout + before.stderr
    with (tmp_path / "kvformat" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{statement}\n")
    after = verdict()
    assert (after.returncode, "1 broken" in after.stdout) == (1, True), after.stdout + after.stderr


# -------------------------------------------------------------------------------------------------------------- errors

RAISED = [code for code, row in CODES.items() if row.kind != "warning"]
ERRORS = [getattr(kvformat.errors, name) for name in kvformat.errors.__all__ if name.endswith("Error")]


def same(left: KVFormatError, right: KVFormatError) -> bool:
    return (type(left), str(left), left.args, vars(left)) == (type(right), str(right), right.args, vars(right))


def test_every_error_class_is_public_in_its_module() -> None:
    def below(cls: type[KVFormatError]) -> set[type[KVFormatError]]:
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    assert {cls for cls in below(KVFormatError) if cls.__module__.startswith("kvformat.")} == set(ERRORS)


@pytest.mark.parametrize("cls", ERRORS)
@pytest.mark.parametrize("where", [{}, {"path": "a/b", "record": "clip-0001", "layer": 3}, {"record": 7}])
def test_error_pickles(cls: type[KVFormatError], where: dict[str, object]) -> None:
    error = cls("expected 1, found 2: mend it", code="E006", **where)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert same(pickle.loads(pickle.dumps(error, protocol)), error)
    assert same(copy.copy(error), error)


@pytest.mark.parametrize("path", [None, "a/b"])
def test_warning_pickles_and_says_its_code(path: str | None) -> None:
    warning = KVFormatWarning("newer", code="W003", path=path)
    assert (warning.code, warning.path, isinstance(warning, UserWarning)) == ("W003", path, True)
    assert str(warning) == ("[W003] newer" if path is None else "[W003] newer (path 'a/b')")
    again = pickle.loads(pickle.dumps(warning))
    assert (type(again), str(again), vars(again)) == (KVFormatWarning, str(warning), vars(warning))


def test_a_newer_minor_version_is_opened_with_a_warning_of_its_code() -> None:
    path = REPOSITORY / "spec" / "vectors" / "v1" / "warn" / "W003-newer-minor" / "dataset"
    with pytest.warns(KVFormatWarning) as caught:
        kvformat.open(path)
    (warning,) = (found.message for found in caught)
    assert isinstance(warning, KVFormatWarning)
    assert (warning.code, warning.path) == ("W003", str(path))
    assert caught[0].filename == __file__  # the caller's line, not the library's


def test_only_warnings_have_no_error_class() -> None:
    assert {code for code in CODES if not CODES[code].error} == {
        code for code in CODES if CODES[code].kind == "warning"
    }
    assert {CODES[code].error for code in RAISED} <= {cls.__name__ for cls in ERRORS}


@pytest.mark.parametrize("code", RAISED)
def test_code_makes_an_error_that_pickles(code: str) -> None:
    error = make_error(code, "expected 1, found 2: mend it", path=Path("a/b"), record="clip", layer=3)
    assert type(error).__name__ == CODES[code].error
    assert str(error) == f"[{code}] expected 1, found 2: mend it (path 'a/b', record 'clip', layer 3)"
    assert same(pickle.loads(pickle.dumps(error)), error)


# ---------------------------------------------------------------------------------------------------------- repository


def test_one_version() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)
    assert newest is not None
    versions = {
        "pyproject.toml": PROJECT["version"],
        "kvformat.__version__": kvformat.__version__,
        "installed": importlib.metadata.version("kvformat"),
        "CHANGELOG.md": newest[1],
    }
    assert len(set(versions.values())) == 1, versions


def test_the_type_marker_is_there() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_no_large_file() -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a checkout: what belongs to the repository is not known")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60).stdout
    files = [REPOSITORY / name for name in names.split("\0") if name]
    assert REPOSITORY / "pyproject.toml" in files
    large = {str(path.relative_to(REPOSITORY)): path.lstat().st_size for path in files if path.is_file()}
    assert {name: nbytes for name, nbytes in large.items() if nbytes > MIB} == {}
