"""Nothing in what is installed runs code out of bytes: no pickle in any clothing, no eval, no exec.

The wheel is built and every module in it is read. Each rule is also shown to bite.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("core", "transport", "memory", "algos", "actors", "launch")

BANNED_MODULES = {
    *("pickle", "_pickle", "cPickle", "pickle5", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"),
    *("copyreg", "multiprocessing", "xmlrpc", "code", "codeop"),
}
"""multiprocessing: its connections, queues and pools unpickle what they receive."""
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_METHODS = {
    *("recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "ProcessPoolExecutor", "unsafe_load"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "runsource", "runcode"),
}
"""torch.distributed's object collectives pickle too."""


def breaches(text: str, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text, name)):
        if isinstance(node, ast.Import):
            yield from (f"{name}:{node.lineno} imports {a.name}" for a in node.names if root(a.name) in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and root(node.module or "") in BANNED_MODULES:
            yield f"{name}:{node.lineno} imports {node.module}"
        elif isinstance(node, ast.Call):
            yield from called(node, name)


def root(module: str) -> str:
    return module.split(".")[0]


def called(node: ast.Call, name: str) -> Iterator[str]:
    target = ast.unparse(node.func)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    last = target.rpartition(".")[2]
    if target in BANNED_CALLS or last in BANNED_METHODS:
        yield f"{name}:{node.lineno} calls {target}"
    if target == "torch.load" and keywords.get("weights_only") != "True":
        yield f"{name}:{node.lineno} torch.load without weights_only=True"
    if last == "load" and keywords.get("allow_pickle", "False") != "False":
        yield f"{name}:{node.lineno} {target} with allow_pickle"
    if target in ("yaml.load", "yaml.full_load"):
        yield f"{name}:{node.lineno} {target}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy: setuptools leaves its work folders beside the sources."""
    tree = tmp_path_factory.mktemp("tree") / "myxa"
    tree.mkdir()
    names = [*FLOORS, "__init__.py", "py.typed", "README.md", "LICENSE", "pyproject.toml"]
    subprocess.run(["cp", "-r", *(str(ROOT / name) for name in names), str(tree)], check=True)
    out = tree.parent / "out"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "-w", str(out), str(tree)], check=True, timeout=300)
    (made,) = out.glob("*.whl")
    return zipfile.ZipFile(made)


@pytest.mark.timeout(300)
def test_nothing_in_the_wheel_runs_code_out_of_bytes(wheel: zipfile.ZipFile):
    modules = [name for name in wheel.namelist() if name.endswith(".py")]
    assert len(modules) > 150
    found = [breach for name in modules for breach in breaches(wheel.read(name).decode(), name)]
    assert not found, "\n".join(found)
    assert not [n for n in wheel.namelist() if Path(n).suffix in (".pkl", ".pickle", ".pt", ".pth", ".so", ".pyc")]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import cloudpickle as c", "def f():\n    import marshal",
        "socket.recv_pyobj()", "eval('1')", "exec(x)", "compile(x, '', 'exec')", "__import__(name)",
        "import multiprocessing.shared_memory", "torch.load(path)", "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)", "yaml.load(text)", "dist.all_gather_object(a, b)",
        "futures.ProcessPoolExecutor(2)",
    ],
)  # fmt: skip
def test_each_rule_bites(text: str):
    assert list(breaches(text, "x.py"))


@pytest.mark.parametrize(
    "text",
    ["torch.load(path, weights_only=True)", "np.load(path)", "re.compile(x)", "from .pickle import x", "a.load()"],
)
def test_what_is_harmless_is_let_through(text: str):
    assert not list(breaches(text, "x.py"))
