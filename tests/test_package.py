"""The package as a whole: what it exports, what importing it costs, and who imports whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qreward_plugins
from qreward_plugins import adapters

ROOT = Path(__file__).parents[1]
ADAPTERS = ("verl_adapter", "slime_adapter", "roll_adapter")

FLOORS = [
    {"frozen"},
    {
        "errors",
        "samples",
        "sample_check",
        "images",
        "spent",
        "config",
        "redaction",
        "cancelling",
        "registry",
        "named_actors",
        "private_directory",
        "processes",
        "threads",
        "output_files",
    },
    {"replicas"},
    {"sources", "quotas", "telemetry", "groups", "prompts"},
    {"observers"},
    {"scheduling"},
    {"judges", "journal", "followed_calls"},
    {"outcomes", "sharing", "streaming", "text_streams"},
    {"judging", "trial"},
    {"scoring"},
    {"start_probe", "source_starts", "reward_phases", "remote"},
    {"wiring"},
    {"binding", "capacity"},
    {"reloading"},
    {"closing"},
    {"engine", "simulation", "testing"},
    {"portal", "probe", "files"},
    {"planning", "client", "proxy", "acceleration"},
    {"server", "transport", "reward_functions", "adapters"},
    {"cli"},
]
"""The rooms from the ground up. A room imports from floors below its own."""

NEIGHBOURS = {  # what may be imported beside that
    ("samples", "errors"),
    ("samples", "spent"),
    ("config", "errors"),
    ("config", "samples"),  # what counts as a number
    ("config", "redaction"),
    ("config", "registry"),
    ("private_directory", "errors"),
    ("output_files", "errors"),
    ("registry", "errors"),
    ("registry", "judges"),  # as sources
    ("registry", "redaction"),
    ("registry", "sources"),  # for type checkers only; classes are imported when a configuration names them
    ("sample_check", "errors"),
    ("sample_check", "images"),
    ("samples", "images"),  # for type checkers only
    ("images", "errors"),
    ("sample_check", "samples"),
    ("errors", "samples"),  # for type checkers only
    ("errors", "spent"),  # for type checkers only
    ("quotas", "telemetry"),
    ("judging", "scoring"),  # for type checkers only
    ("engine", "portal"),  # portal() opens it on call
    ("probe", "engine"),
    ("portal", "engine"),
    ("simulation", "engine"),  # the soak plays all of it
}


FRAMEWORKS = {"verl", "slime", "roll", "torch", "ray", "transformers", "verl_adapter", "slime_adapter", "roll_adapter"}
"""What the core never imports; but the batches of the stand-in for ROLL hold tensors, as ROLL's do, and what processes
share lives on Ray, which is imported when it is used.
"""


def floor_of(room):
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imports():
    """(importing room, imported room, file) for every import inside the package."""
    package = ROOT / "qreward_plugins"
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = parts[: len(parts) - node.level] if node.level <= len(parts) else ()
                target = (*base, *(node.module or "").split(".")) if node.module else base
                target = tuple(part for part in target if part)
                rooms = [target[0]] if target else [alias.name for alias in node.names]
                for room in rooms:
                    if parts[0] != "__init__" and room != parts[0]:
                        yield parts[0], room, path


def test_imports_go_down_only():
    wrong = [
        f"{path.relative_to(ROOT)}: {importer} imports {imported}"
        for importer, imported, path in imports()
        if floor_of(imported) >= floor_of(importer) and (importer, imported) not in NEIGHBOURS
    ]
    assert wrong == []


def imports_at_start(path):
    """The files of this package that a module imports when it is imported itself, without those for type checkers."""
    package = ROOT / "qreward_plugins"
    parts = path.relative_to(package.parent).with_suffix("").parts
    home = parts[:-1]

    def files(name):
        module = package.parent.joinpath(*name)
        if module.with_suffix(".py").is_file():
            return [module.with_suffix(".py")]
        return [module / "__init__.py"] if (module / "__init__.py").is_file() else []

    def walk(nodes):
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                yield from walk(node.orelse)
                continue
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("qreward_plugins")):
                base = home[: len(home) - node.level + 1] if node.level else ()
                name = (*base, *(node.module or "").split(".")) if node.module else base
                for alias in node.names:
                    yield from files((*name, alias.name)) or files(name)
            if isinstance(node, ast.stmt | ast.ExceptHandler):
                yield from walk(ast.iter_child_nodes(node))

    return set(walk(ast.parse(path.read_text()).body)) - {path}


def test_no_file_imports_itself_by_way_of_others():
    """Imports for type checkers do not count."""
    graph = {path: imports_at_start(path) for path in (ROOT / "qreward_plugins").rglob("*.py")}
    assert sum(map(len, graph.values())) > len(graph)
    done, circles = set(), []

    def visit(path, way):
        if path in way:
            circles.append(" -> ".join(str(each.relative_to(ROOT)) for each in (*way[way.index(path) :], path)))
        elif path not in done:
            for other in sorted(graph[path]):
                visit(other, [*way, path])
            done.add(path)

    for path in sorted(graph):
        visit(path, [])
    assert circles == []


def test_scheduling_knows_neither_samples_nor_judges():
    """The scheduler moves calls; what they are for is the business of those who make them."""
    known = {room for importer, room, _ in imports() if importer == "scheduling"}
    assert known.isdisjoint({"samples", "sample_check", "judges", "judging", "scoring", "engine"}), known


def test_the_core_knows_no_framework():
    wrong = []
    for path in sorted((ROOT / "qreward_plugins").rglob("*.py")):
        tree = ast.parse(path.read_text())
        in_functions = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in names:
                framework, where = name.split(".")[0], path.as_posix()
                allowed = {
                    "torch": "testing/roll/" in where,
                    "ray": ("/sharing/" in where or "/named_actors" in where or "/replicas/ray_" in where)
                    and id(node) in in_functions,
                }.get(framework, False)
                if framework in FRAMEWORKS and not allowed:
                    wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []


def names_from_the_core(folder):
    """(file, module, name) for every import from this package."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qreward_plugins"):
                for alias in node.names:
                    yield path.relative_to(ROOT), node.module, alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("qreward_plugins"):
                        yield path.relative_to(ROOT), alias.name, ""


def test_adapters_import_public_names_only():
    """Those of the package, and of `adapters`, which has none that no adapter takes."""
    found = [each for folder in ADAPTERS for each in names_from_the_core(folder)]
    public = {"qreward_plugins": qreward_plugins.__all__, "qreward_plugins.adapters": adapters.__all__}
    wrong = [f"{path}: {module}.{name}" for path, module, name in found if name not in public.get(module, ())]
    assert wrong == [], "give adapters what they need by qreward_plugins.adapters"
    assert set(adapters.__all__) == {name for _, module, name in found if module == "qreward_plugins.adapters"}


@pytest.mark.parametrize("folder", ["hydra_plugins", "recipes"])
def test_recipes_import_nothing_private(folder):
    wrong = [
        f"{path}: {module}.{name}"
        for path, module, name in names_from_the_core(folder)
        if any(part.startswith("_") for part in (*module.split("."), name))
    ]
    assert wrong == []


@pytest.mark.parametrize("name", qreward_plugins.__all__)
def test_every_public_name_is_there_and_knows_its_home(name):
    home = getattr(getattr(qreward_plugins, name), "__module__", "qreward_plugins")
    assert home.startswith("qreward_plugins") or name in ("Event", "Outcome", "Split")
    assert name in dir(qreward_plugins)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="RewardEngin"):
        _ = qreward_plugins.RewardEngin


def test_importing_costs_little_and_pulls_in_no_framework():
    program = (
        "import time; start = time.process_time(); import qreward_plugins; took = time.process_time() - start\n"
        "import sys; print(took, [name for name in ('torch', 'ray', 'verl', 'aiohttp') if name in sys.modules])"
    )
    results = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split(" ", 1)
        for _ in range(3)
    ]
    assert {loaded.strip() for _, loaded in results} == {"[]"}
    assert min(float(took) for took, _ in results) < 0.3


def test_the_engine_itself_loads_neither_torch_nor_ray():
    program = (
        "import sys, qreward_plugins; qreward_plugins.RewardEngine; print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert version("qreward-plugins") == qreward_plugins.__version__


@pytest.mark.parametrize("package", ["qreward_plugins", "verl_adapter", "slime_adapter", "roll_adapter"])
def test_every_package_says_that_it_is_typed(package):
    assert (ROOT / package / "py.typed").is_file()
