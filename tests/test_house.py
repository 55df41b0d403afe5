"""The laws of the house. Every law is a function from a tree of files to a list of breaches, so that each is also shown
to bite: on a small tree that breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOT_MODULES = ("__init__.py", "__main__.py")
FLOORS = ("core", "transport", "memory", "algos", "actors", "launch")
HEIGHT = {"core": 0, "transport": 1, "memory": 2, "algos": 2, "actors": 3, "launch": 4}
ADAPTERS = ("actors.engines", "actors.backends", "actors.weights.channels", "actors.sinks")
BESIDE_ADAPTERS = ("actors.models", "actors.data", "actors.workflows")
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
SLICE_LINES = 120
"""A module below this that at most one other imports is a slice of that one."""
MAX_SLICES = 12
"""Seams and entry points; goes down only."""
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}
RUNS_ANSWERS = "actors/rewards/unit_test_runner.py"
READS_INDEXES = "actors/backends/convert.py"
"""Of foreign checkpoints, which torch pickles: by an Unpickler that makes named classes alone."""
BANNED_MODULES = {
    *("pickle", "_pickle", "cPickle", "pickle5", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"),
    *("copyreg", "multiprocessing", "xmlrpc", "code", "codeop"),
}
"""multiprocessing: its connections, queues and pools unpickle what they receive."""
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "yaml.full_load"}
BANNED_METHODS = {
    *("recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "ProcessPoolExecutor", "unsafe_load"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "runsource", "runcode"),
}
"""torch.distributed's object collectives pickle too."""
TASK_MAKERS = r"^asyncio\.(create_task|ensure_future)$|(^|_|\.)loop(\(\))?\.create_task$"
COMPANIONS = {"annotated-types": "pydantic", "pydantic-core": "pydantic", "markupsafe": "jinja2"}
"""Distributions that come with another one, whose public types are theirs."""
HEAVY = ("torch", "transformers", "pyarrow", "tensorboard", "math_verify", "sglang", "megatron")


# -- reading a tree ------------------------------------------------------------------------------------------------


@cache
def parsed(path: Path, stamp: int) -> ast.Module:
    del stamp
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def tree_of(path: Path) -> ast.Module:
    return parsed(path, path.stat().st_mtime_ns)


@cache
def walked(path: Path, stamp: int) -> list[ast.AST]:
    return list(ast.walk(parsed(path, stamp)))


def nodes_of(path: Path) -> list[ast.AST]:
    """All of the module's."""
    return walked(path, path.stat().st_mtime_ns)


@cache
def modules(root: Path) -> list[Path]:
    """All Python files of the package, paths relative to the root."""
    files = [
        *(root / name for name in ROOT_MODULES),
        *(file for floor in FLOORS for file in sorted((root / floor).rglob("*.py"))),
    ]
    return [file.relative_to(root) for file in files if file.exists()]


def name_of(path: Path) -> str:
    """`core/config/root.py` -> `core.config.root`; a package's `__init__.py` has the package's name."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_for_types_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def imports(path: Path, root: Path, *, at_import_time: bool = False) -> list[tuple[int, str, int]]:
    """(line, dotted target, relative level) of every import; relative ones are resolved against the root."""
    package, found = path.parent.parts, list[tuple[int, str, int]]()
    for node in nodes_at_import_time(root / path) if at_import_time else nodes_of(root / path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            stem = [*base, *(node.module.split(".") if node.module else [])]
            found += [(node.lineno, ".".join([*stem, alias.name]), node.level) for alias in node.names]
    return found


def nodes_at_import_time(path: Path) -> Iterator[ast.AST]:
    """But those in functions, and those for types only."""
    stack: list[ast.AST] = [tree_of(path)]
    while stack:
        node = stack.pop()
        yield node
        is_later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if not is_later and not (isinstance(node, ast.stmt) and is_for_types_only(node)):
            stack.extend(ast.iter_child_nodes(node))


def resolve(target: str, known: set[str]) -> str | None:
    """The module that a dotted target means: itself, or the module that defines its last name."""
    if target in known:
        return target
    parent = target.rpartition(".")[0]
    return parent if parent in known else None


@cache
def inner_edges(root: Path, *, at_import_time: bool) -> dict[str, set[str]]:
    """module -> modules of the house that it imports."""
    known = {name_of(path) for path in modules(root)}
    edges: dict[str, set[str]] = {name: set() for name in known}
    for path in modules(root):
        for _, target, level in imports(path, root, at_import_time=at_import_time):
            found = resolve(target, known) if level else None
            if found is not None and found != name_of(path):
                edges[name_of(path)].add(found)
    return edges


# -- laws ----------------------------------------------------------------------------------------------------------


def unlisted_packages(root: Path) -> list[str]:
    """Every folder with Python files is a package listed in pyproject.toml, and every listed package exists."""
    listed = set(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"myxa"} | {".".join(("myxa", *path.parent.parts)) for path in modules(root) if path.parent.parts}
    breaches = [f"{name} is not listed in pyproject.toml" for name in sorted(found - listed)]
    breaches += [f"{name} is listed but not there" for name in sorted(listed - found)]
    for name in sorted(found & listed):
        if not (root.joinpath(*name.split(".")[1:]) / "__init__.py").exists():
            breaches.append(f"{name} has no __init__.py")
    return breaches


def wrong_links(root: Path) -> list[str]:
    """`.ns/myxa` holds one relative link per floor and root file, and nothing else but what Python leaves there.
    An sdist holds no links."""
    if (root / "PKG-INFO").exists() and not (root / ".ns").exists():
        return []
    wanted = {name: f"../../{name}" for name in (*FLOORS, *ROOT_MODULES, "py.typed")}
    links = [path for path in (root / ".ns/myxa").iterdir() if path.name != "__pycache__"]
    found = {path.name: str(path.readlink()) if path.is_symlink() else "" for path in links}
    return [f".ns/myxa/{name}: {found.get(name)!r}, want {wanted.get(name)!r}"
            for name in sorted(wanted.keys() | found.keys()) if found.get(name) != wanted.get(name)]  # fmt: skip


def misplaced_files(root: Path) -> list[str]:
    """No package inside tests/, no stray module in the root, no cupboard names."""
    breaches = [f"{path.relative_to(root)} makes tests a package" for path in (root / "tests").rglob("__init__.py")]
    breaches += [f"{path.name} in the root becomes part of the package"
                 for path in root.glob("*.py") if path.name not in ROOT_MODULES]  # fmt: skip
    for path in modules(root):
        words = set(path.with_suffix("").parts)
        breaches += [f"{path}: '{word}' says nothing" for word in sorted(words & BANNED_NAMES)]
    return breaches


def oversize(root: Path) -> list[str]:
    """Files and functions stay small enough to be read in one go."""
    breaches: list[str] = []
    for path in modules(root):
        num_lines = len((root / path).read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            breaches.append(f"{path} has {num_lines} lines")
        for node in nodes_of(root / path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    breaches.append(f"{path}:{node.lineno} {node.name} has {length} lines")
    return breaches


def upward_imports(root: Path) -> list[str]:
    """launch > actors > (algos | memory) > transport > core; algos and memory do not know each other."""
    breaches: list[str] = []
    for source, targets in inner_edges(root, at_import_time=False).items():
        for target in targets:
            here, there = source.split(".")[0], target.split(".")[0]
            if here not in HEIGHT or there not in HEIGHT or here == there:
                continue
            if HEIGHT[there] >= HEIGHT[here]:
                breaches.append(f"{source} imports {target}")
    return sorted(breaches)


def roles_that_know_adapters(root: Path) -> list[str]:
    """Roles in actors/ work over protocols: all but the adapters' own packages and what only these stand on."""
    edges = inner_edges(root, at_import_time=False)
    return sorted(
        f"{source} imports {target}"
        for source, targets in edges.items()
        for target in targets
        if source.startswith("actors.") and not source.startswith((*ADAPTERS, *BESIDE_ADAPTERS))
        if target.startswith(ADAPTERS)
    )


def package_of(module: str) -> str:
    """`actors.buffer.groups` -> `actors.buffer`; a module that lies directly on a floor stands for itself."""
    return ".".join(module.split(".")[:2])


def package_cycles(root: Path) -> list[str]:
    """On the upper floors no two packages need each other: each can be read, and moved, without the other."""
    edges: dict[str, set[str]] = {}
    for source, targets in inner_edges(root, at_import_time=True).items():
        here = package_of(source)
        if not here.startswith(("actors.", "launch.")):
            continue
        edges.setdefault(here, set()).update(package_of(t) for t in targets if package_of(t) != here)
    return circles(edges)


def absolute_self_imports(root: Path) -> list[str]:
    """Inside the package imports are relative: an absolute one would load a second copy or a foreign `core`."""
    return [
        f"{path}:{line} imports {target}"
        for path in modules(root)
        for line, target, level in imports(path, root)
        if level == 0 and target.split(".")[0] in {"myxa", *FLOORS}
    ]


def code_out_of_bytes(root: Path) -> list[str]:
    """Nothing that is installed runs code out of bytes: no pickle in any clothing, no eval, no exec; but for what runs
    answers with unit tests, in a sandbox, and what reads the indexes of foreign checkpoints."""
    found = [
        f"{path}:{line} imports {target}"
        for path in modules(root)
        for line, target, level in imports(path, root)
        if level == 0 and target.split(".")[0] in BANNED_MODULES and (str(path), target) != (READS_INDEXES, "pickle")
    ]
    for path in (one for one in modules(root) if str(one) != RUNS_ANSWERS):
        calls = (node for node in nodes_of(root / path) if isinstance(node, ast.Call))
        found += [f"{path}:{call.lineno} {ast.unparse(call.func)}" for call in calls if runs_code(call)]
    return found


def runs_code(call: ast.Call) -> bool:
    target = ast.unparse(call.func)
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    last = target.rpartition(".")[2]
    return (
        target in BANNED_CALLS
        or last in BANNED_METHODS
        or (target == "torch.load" and keywords.get("weights_only") != "True")
        or (last == "load" and keywords.get("allow_pickle", "False") != "False")
    )


def orphans_and_sleepers(root: Path) -> list[str]:
    """No task that nobody keeps, no sleeping in a process that has a loop, no print below launch."""
    breaches: list[str] = []
    for path in modules(root):
        for node in nodes_of(root / path):
            call = node.value if isinstance(node, ast.Expr) else node
            if not isinstance(call, ast.Call):
                continue
            called = ast.unparse(call.func)
            if node is not call and re.search(TASK_MAKERS, called):
                breaches.append(f"{path}:{call.lineno} calls {called} and forgets the task")
            if called == "time.sleep":
                breaches.append(f"{path}:{call.lineno} calls {called}")
            if called == "print" and path.parts[0] != "launch":
                breaches.append(f"{path}:{call.lineno} prints")
    return sorted(set(breaches))


def swallowed_errors(root: Path) -> list[str]:
    """A broad except that only passes hides the cause."""
    breaches: list[str] = []
    for path in modules(root):
        for node in nodes_of(root / path):
            if not isinstance(node, ast.ExceptHandler):
                continue
            kinds = "" if node.type is None else ast.unparse(node.type)
            is_broad = kinds == "" or re.search(r"\b(Base)?Exception\b", kinds)
            is_silent = all(isinstance(s, ast.Pass) or ast.unparse(s) in ("...", "continue") for s in node.body)
            if is_broad and is_silent:
                breaches.append(f"{path}:{node.lineno} swallows {kinds or 'everything'}")
    return breaches


def import_circles(root: Path) -> list[str]:
    """No modules need each other, not even for types only or inside a function: each can be read without the others."""
    return circles(inner_edges(root, at_import_time=False))


def classes_named_twice(root: Path) -> list[str]:
    """One name, one thing: no public class name is defined in two modules."""
    return [
        f"{name} is defined in {' and '.join(map(str, places))}"
        for name, places in public_classes(root).items()
        if len(places) > 1
    ]


def public_classes(root: Path) -> dict[str, list[Path]]:
    """Name of each public class -> the modules that define it."""
    places: dict[str, list[Path]] = {}
    for path in modules(root):
        for node in nodes_of(root / path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    return places


def too_many_slices(root: Path) -> list[str]:
    """One noun, one file: a short module that at most one other module imports is a part of that one, unless a second
    implementation stands behind it."""
    found = slices(root)
    if len(found) <= MAX_SLICES:
        return []
    return [f"{len(found)} slices, at most {MAX_SLICES}: " + ", ".join(found)]


def slices(root: Path) -> list[str]:
    """Modules under `SLICE_LINES` lines that at most one other module imports."""
    num_importers = Counter(
        target for targets in inner_edges(root, at_import_time=False).values() for target in targets
    )
    return [
        str(path)
        for path in modules(root)
        if path.name != "__init__.py" and path.parent.parts
        if len((root / path).read_text(encoding="utf-8").splitlines()) < SLICE_LINES
        if num_importers[name_of(path)] <= 1
    ]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Every way round that a walk along the arrows finds."""
    breaches: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            breaches.append(" -> ".join((*trail[trail.index(name) :], name)))
            return
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            visit(target, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return breaches


def heads_missing(root: Path) -> list[str]:
    """Every module says what it is; empty package faces are let off."""
    return [
        f"{path} has no docstring"
        for path in modules(root)
        if (body := tree_of(root / path).body) and ast.get_docstring(tree_of(root / path)) is None and body
    ]


LAWS = (
    unlisted_packages,
    wrong_links,
    misplaced_files,
    oversize,
    upward_imports,
    roles_that_know_adapters,
    absolute_self_imports,
    code_out_of_bytes,
    orphans_and_sleepers,
    swallowed_errors,
    import_circles,
    package_cycles,
    classes_named_twice,
    too_many_slices,
    heads_missing,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_house_keeps_the_law(law):
    breaches = law(ROOT)
    assert not breaches, "\n".join((law.__doc__ or "", *breaches))


# -- each law bites ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_house(tmp_path: Path) -> Path:
    """A lawful house with one module per floor."""
    (tmp_path / ".ns/myxa").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name in (*FLOORS, *ROOT_MODULES, "py.typed"):
        (tmp_path / ".ns/myxa" / name).symlink_to(f"../../{name}")
    (tmp_path / "__init__.py").write_text('"""Face."""\n')
    (tmp_path / "py.typed").touch()
    for floor in FLOORS:
        write(tmp_path, f"{floor}/__init__.py", "")
        write(tmp_path, f"{floor}/thing.py", '"""A thing."""\n')
    write(tmp_path, "actors/engines/__init__.py", "")
    write(tmp_path, "actors/engines/one.py", '"""An adapter."""\n')
    names = ", ".join(f'"{name}"' for name in ("myxa", *(f"myxa.{floor}" for floor in FLOORS), "myxa.actors.engines"))
    write(tmp_path, "pyproject.toml", f"[tool.setuptools]\npackages = [{names}]\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_lawful_house_is_left_alone(small_house: Path):
    assert [breach for law in LAWS for breach in law(small_house)] == []


BREACHES = [
    (unlisted_packages, "core/deep/__init__.py", '"""Deep."""\n', "myxa.core.deep is not listed"),
    (unlisted_packages, "core/deep/thing.py", '"""Deep."""\n', "myxa.core.deep is not listed"),
    (misplaced_files, "tests/__init__.py", "", "makes tests a package"),
    (misplaced_files, "conftest.py", "", "conftest.py in the root"),
    (misplaced_files, "core/utils.py", '"""Bits."""\n', "says nothing"),
    (oversize, "core/long.py", '"""Long."""\n' + "A = 1\n" * 800, "801 lines"),
    (oversize, "core/long.py", "def f():\n" + "    a = 1\n" * 60, "f has 61 lines"),
    (upward_imports, "core/thing.py", "from ..actors.thing import x\n", "core.thing imports actors.thing"),
    (
        upward_imports,
        "memory/thing.py",
        "def f():\n    from ..algos import thing\n",
        "memory.thing imports algos.thing",
    ),
    (upward_imports, "algos/thing.py", "from ..memory import thing\n", "algos.thing imports memory.thing"),
    (roles_that_know_adapters, "actors/rollout/rollout.py", "from .. import engines\n", "imports actors.engines"),
    (absolute_self_imports, "launch/thing.py", "from myxa.core import thing\n", "imports myxa.core.thing"),
    (absolute_self_imports, "launch/thing.py", "import core.thing\n", "imports core.thing"),
    *(
        (code_out_of_bytes, "transport/thing.py", f"{text}\n", "transport/thing.py:")
        for text in (
            *("import pickle", "from pickle import loads", "import cloudpickle as c", "def f():\n    import marshal"),
            *("socket.recv_pyobj()", "eval('1')", "exec(x)", "compile(x, '', 'exec')", "__import__(name)"),
            *("import multiprocessing.shared_memory", "torch.load(path)", "torch.load(path, weights_only=False)"),
            *("np.load(path, allow_pickle=True)", "yaml.load(text)", "dist.all_gather_object(a, b)"),
            "futures.ProcessPoolExecutor(2)",
        )
    ),
    (orphans_and_sleepers, "actors/thing.py", "import asyncio\nasyncio.create_task(f())\n", "asyncio.create_task"),
    (orphans_and_sleepers, "actors/thing.py", "self._loop.create_task(f())\n", "self._loop.create_task"),
    (orphans_and_sleepers, "actors/thing.py", "import time\ntime.sleep(1)\n", "time.sleep"),
    (orphans_and_sleepers, "core/thing.py", "print('x')\n", "core/thing.py:1 prints"),
    (swallowed_errors, "core/thing.py", "try:\n    f()\nexcept Exception:\n    pass\n", "swallows Exception"),
    (swallowed_errors, "core/thing.py", "try:\n    f()\nexcept:\n    pass\n", "swallows everything"),
    (import_circles, "core/thing.py", "from .other import x\n", "core.other -> core.thing -> core.other"),
    (
        import_circles,
        "core/thing.py",
        "if TYPE_CHECKING:\n    from . import other\n",
        "core.other -> core.thing -> core",
    ),
    (import_circles, "core/thing.py", "def f():\n    from .other import x\n", "core.other -> core.thing -> core.other"),
    (classes_named_twice, "core/other.py", "class Thing:\n    class Part:\n        pass\n", "Part is defined in"),
    (
        package_cycles,
        "actors/engines/one.py",
        "from ..thing import x\n",
        "actors.engines -> actors.thing -> actors.eng",
    ),
    (heads_missing, "core/thing.py", "A = 1\n", "core/thing.py has no docstring"),
]


@pytest.mark.parametrize(("law", "path", "text", "said"), BREACHES)
def test_each_law_bites(small_house: Path, law, path: str, text: str, said: str):
    write(small_house, path, text)
    if law is import_circles:
        write(small_house, "core/other.py", "from . import thing\n")
    if law is classes_named_twice:
        write(small_house, "launch/other.py", "class Part:\n    pass\n")
    if law is package_cycles:
        write(small_house, "actors/thing.py", "from .engines import two\n")
        write(small_house, "actors/engines/two.py", "")
    assert any(said in breach for breach in law(small_house)), law(small_house)


def test_what_only_looks_like_running_code_is_let_through(small_house: Path):
    lines = "torch.load(path, weights_only=True)\nnp.load(path)\nre.compile(x)\nfrom .pickle import x\na.load()"
    write(small_house, "transport/thing.py", lines)
    assert code_out_of_bytes(small_house) == []


def test_a_listed_package_that_is_gone_is_seen(small_house: Path):
    (small_house / "memory/thing.py").unlink()
    (small_house / "memory/__init__.py").unlink()
    assert unlisted_packages(small_house) == ["myxa.memory is listed but not there"]


def test_a_missing_and_a_looping_link_are_seen(small_house: Path):
    (small_house / ".ns/myxa/core").unlink()
    (small_house / ".ns/myxa/all").symlink_to("..")
    assert [breach.split(":")[0] for breach in wrong_links(small_house)] == [".ns/myxa/all", ".ns/myxa/core"]


def test_a_slice_too_many_is_seen(small_house: Path):
    for number in range(MAX_SLICES + 1):
        write(small_house, f"memory/slice_{number}.py", '"""A slice."""\n')
    write(small_house, "memory/slice_0.py", '"""Long enough."""\n' + "A = 1\n" * SLICE_LINES)
    count = len(slices(small_house))
    assert "memory/slice_0.py" not in slices(small_house)
    assert too_many_slices(small_house)[0].startswith(f"{count} slices")


# -- packaging and weight ------------------------------------------------------------------------------------------


LIGHT = ("actors.checkpoints.folder", "actors.models.tiny", "actors.models.tokenizer", "launch.cli", "launch.launcher", "launch.worker", "actors.contracts", "actors.coordinator.coordinator",
         "actors.buffer.buffer", "actors.monitor.monitor", "transport.node", "core.config")  # fmt: skip


def test_the_package_face_is_light_and_light_processes_load_no_heavy_library():
    code = f"""import importlib, sys, myxa
print(*(f"the face loads {{one}}" for one in ("zmq", "torch", "numpy", "asyncio") if one in sys.modules))
for module in ("actors.gateway.clients", "actors.environments.worker"):
    importlib.import_module(f"myxa.{{module}}")
print("workers of users' code load pydantic" if "pydantic" in sys.modules else "", end="")
for module in {LIGHT!r}:
    importlib.import_module(f"myxa.{{module}}")
    print(*(f"{{module}} loads {{heavy}}" for heavy in {HEAVY!r} if heavy in sys.modules))"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (out.returncode, out.stdout.split()) == (0, []), out.stdout + out.stderr


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (req for name, reqs in project["optional-dependencies"].items() if name != "dev" for req in reqs)
    declared = {distribution_of(requirement) for requirement in [*project["dependencies"], *extras]}
    owners = metadata.packages_distributions()
    for path in modules(ROOT):
        for line, target, level in imports(path, ROOT):
            top = target.split(".")[0]
            if level or top in sys.stdlib_module_names:
                continue
            names = {name.lower().replace("_", "-") for name in owners.get(top, [top])}
            names |= {COMPANIONS[name] for name in names & COMPANIONS.keys()}
            assert names & declared, f"{path}:{line} imports {target}, of {names}, which pyproject.toml does not name"


def distribution_of(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert name is not None
    return name[0].lower().replace("_", "-")


def test_every_dependency_has_one_exact_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    pins = [line.partition(";")[0].strip().split("==") for line in lines if line and not line.startswith("#")]
    (extras,) = re.findall(r"^EXTRAS := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    wanted = [
        *project["dependencies"],
        *(req for extra in extras.split(",") for req in project["optional-dependencies"][extra]),
    ]
    for requirement in wanted:
        assert distribution_of(requirement) in [name for name, _ in pins], requirement
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for _, version in pins), "no ranges, no local versions"
