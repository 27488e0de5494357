"""The package as a whole: what it exports, what importing it costs, and who imports whom."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

import qreward_plugins
from qreward_plugins import adapters

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "qreward_plugins"
ADAPTERS = ("verl_adapter", "slime_adapter", "roll_adapter")

FLOORS = [
    {"errors", "secrets"},
    {"system", "samples", "config"},
    {"quotas", "observers", "replicas", "client", "files"},
    {"sources"},
    {"scheduling", "sharing"},
    {"judges", "journal"},
    {"engine", "acceleration", "checks"},
    {"adapters", "server", "simulation"},
    {"planning", "testing", "ui", "bridges"},
    {"cli"},
]
"""The rooms from the ground up. A room imports from floors below its own, for type checkers too. So no room imports
itself by way of others.
"""

CEILINGS = {
    "class names that stand twice": 25,
    "constructors with more than two on_* callbacks": 0,
    "modules below 60 lines": 5,
    "modules above 450 lines": 0,
    "names of modules that are no nouns": 1,
    "floors of files": 22,
    "floors of files in scheduling": 8,
    "floors of files in sources": 8,
}
"""What may only fall. Lower a number with the commit that reaches it."""

CODE_LINES = {
    "testing": 5_130,
    # Functions with devices, methods of Ray actors, and embeddings ("Reach"). The event loop watches the channels of
    # worker processes, which takes a quarter of the processor time of a call away.
    # What bounds a completion in a body is read here, which the quotas did. A function whose parameters do not fit is
    # refused before the first sample.
    "sources": 5_855,
    # Budgets, which say why a call cannot be paid. One process tests a source that throttles without a time. Pauses,
    # breakers and budgets became parts of `quotas`, because accelerated functions and `sharing` use them, too.
    # A source that has never answered, one that is slower after an outage, and samples that always fail.
    "scheduling": 3_545,
    "simulation": 2_585,
    # Gates, cascades, panels, ranks, schedules, labels, rubrics, programs in a sandbox ("Judging"); forms of answers,
    # references and `show`, with the extraction of answers, which the checks have given away. Bars and parts that
    # cannot work are refused. Calls for texts, which moved here from the engine for judges of one's own;
    # similarity. `turns`, and what each step adds to a score. What a function returned becomes JSON here, and no more
    # in the reward server and the adapter of verl.
    # The images of a sample became parts of messages in `sources` before.
    "judges": 3_640,
    # `why`, `replay`, `diff`, `audit`, `export`, `ui`, prompts and the end of `score` ("Seeing"); `bench`; `sources`,
    # to hold one of a run that goes on; `serve-judge MODEL`; groups in `score`. `check --framework` and its cautions,
    # which were the recipes'. `replay` reads samples back, which the journal did. The time left knows rate limits and
    # the deadline.
    "cli": 3_390,
    # Where the samples of a group are compared; sources held by hand; whole texts and embeddings. Sources are opened
    # with their limits and budgets here, which the scheduler did.
    "engine": 2_418,
    "acceleration": 1_310,
    "replicas": 1_630,
    "config": 1_535,
    # Limits that nobody declared are learned by all workers together. A keeper of another version is refused.
    "sharing": 1_620,
    # Pauses, breakers and budgets, which the scheduler had.
    "quotas": 1_665,
    # The share of failing requests from a journal, and what a comparison assumes.
    "planning": 1_070,
    "server": 1_090,
    # `siblings`: verl's workers get samples one by one. `rollouts`: to which tokens parts of rewards belong.
    # Rows are read in slices of the event loop: a thread took as long as decoding.
    "verl_adapter": 1_490,
    # Strict JSON is read here, which the sources did.
    "samples": 998,
    # Bugs of judges and sources are logged once here, which the scheduler and the engine did for each sample.
    "observers": 630,
    # `texts`, `stories`, `comparison`, `audit` and `live_sources` ("Seeing"): what is read from a journal.
    # What it records of a call's attempts, which the scheduler had.
    "journal": 1_805,
    # It records what slime trains on.
    "slime_adapter": 700,
    # Its loop gathers a group whose rewards ROLL asks for one by one; `advantages` records what ROLL trains on.
    "roll_adapter": 700,
    # Compare, audit, what a step waited for, the sources of a run that goes on, and new weights of judges. `figures`:
    # what takes seconds is computed in other processes.
    "ui": 905,
    # Ready-made reward functions.
    "checks": 185,
    "client": 450,
    # Labelled rows, for `bench`.
    "files": 440,
    # Pools of processes, which three rooms made for themselves. Items that are drawn in threads. Scripts without a main
    # guard, and streams that hold what waits for an earlier outcome.
    "system": 425,
    # It gathers groups for judges that compare siblings.
    "adapters": 162,
    # TRL, verifiers, NeMo-Gym and OpenEnv: at most 80 lines each.
    "bridges": 275,
}
"""Most code lines of a room, a little above what it has reached. A feature may raise its number, and says why."""

NO_NOUNS = {
    "binding",
    "closing",
    "findable",
    "loading",
    "opening",
    "passed_requests",
    "reloading",
    "streaming",
    "wiring",
}


FRAMEWORKS = {"verl", "slime", "roll", "torch", "ray", "transformers", "verl_adapter", "slime_adapter", "roll_adapter"}
"""What the core never imports; but the batches of the stand-in for ROLL hold tensors, as ROLL's do, and what processes
share lives on Ray, which is imported when it is used.
"""


def floor_of(room):
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def modules():
    """(parts of the path below the package, syntax tree, number of lines) of every module."""
    return [
        (path.relative_to(PACKAGE).with_suffix("").parts, tree_of(path), len(path.read_text().splitlines()))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


class Import(NamedTuple):
    """`from module import name`, or `import module`, with the whole name of the module."""

    module: str
    name: str
    in_function: bool
    for_types: bool

    @property
    def parts(self):
        """What is imported from the package, as parts below it."""
        package, *parts = self.module.split(".")
        return (*parts, self.name) if package == "qreward_plugins" else ()


@functools.cache
def imports_of(path):
    """Every import of a file."""
    home = path.relative_to(ROOT).parts[:-1]

    def walk(nodes, in_function=False, for_types=False):
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                base = home[: len(home) - node.level + 1] if node.level else ()
                module = ".".join((*base, node.module) if node.module else base)
                yield from (Import(module, alias.name, in_function, for_types) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (Import(alias.name, "", in_function, for_types) for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                yield from walk(node.body, in_function, for_types=True)
                yield from walk(node.orelse, in_function, for_types)
            else:
                inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(ast.iter_child_nodes(node), inside, for_types)

    return list(walk(tree_of(path).body))


def imports_below(*folders):
    """(file, import) for every import of the files in folders."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path, one) for path in paths for one in imports_of(path)]


def test_there_is_a_floor_for_every_room():
    rooms = {parts[0] for parts, _, _ in modules()} - {"__init__"}
    assert rooms == set.union(*FLOORS)
    assert len(rooms) == sum(map(len, FLOORS)) == 26


def test_imports_go_down_only():
    wrong = []
    for path, one in imports_below("qreward_plugins"):
        importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        imported = one.parts[0] if one.parts else "__"
        if importer in ("__init__", imported) or imported.startswith("__"):
            continue
        if imported not in set.union(*FLOORS) or floor_of(imported) >= floor_of(importer):
            wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(one.parts)}")
    assert wrong == []


@functools.cache
def imports_at_start(path):
    """The files of this package that a module imports when it is imported itself, without those for type checkers."""
    found = set()
    for one in imports_of(path):
        if one.parts and not one.in_function and not one.for_types:
            module = PACKAGE.joinpath(*one.parts)
            files = [module.with_suffix(".py"), module / "__init__.py"]
            files += [module.parent.with_suffix(".py"), module.parent / "__init__.py"]
            found |= set([file for file in files if file.is_file()][:1])
    return found - {path}


def floors_of_files(room=""):
    """The files in the longest chain of imports inside a room, or the package. Those for type checkers do not count."""
    graph = {path: imports_at_start(path) for path in (PACKAGE / room).rglob("*.py")}

    @functools.cache
    def height(path):
        return 1 + max(map(height, graph[path] & graph.keys()), default=0)

    return max(map(height, graph))


@functools.cache
def counted():
    classes, callbacks, short, long, no_nouns = Counter(), 0, 0, 0, 0
    for parts, tree, lines in modules():
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
        makers = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        names = [[a.arg for a in (*n.args.args, *n.args.kwonlyargs)] for n in makers]
        callbacks += sum(sum(name.startswith("on_") for name in each) > 2 for each in names)
        short += lines < 60 and parts[-1] != "__init__"
        long += lines > 450
        no_nouns += parts[-1] in NO_NOUNS
    twice = sum(count > 1 for count in classes.values())
    return dict(
        zip(
            CEILINGS,
            (twice, callbacks, short, long, no_nouns, *map(floors_of_files, ("", "scheduling", "sources"))),
            strict=True,
        )
    )


@pytest.mark.parametrize("what", CEILINGS)
def test_no_ceiling_is_broken(what):
    assert counted()[what] <= CEILINGS[what]


def code_lines(path):
    """The number of lines with code, without blank lines, comments and docstrings."""
    texts = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    with path.open() as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in nothing]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - texts)


@pytest.mark.parametrize("room", CODE_LINES)
def test_no_room_grows_unseen(room):
    place = ROOT / room if room.endswith("_adapter") else PACKAGE / room
    assert sum(map(code_lines, place.rglob("*.py"))) <= CODE_LINES[room]


def test_no_file_imports_itself_by_way_of_others():
    """Imports for type checkers do not count."""
    graph = {path: imports_at_start(path) for path in PACKAGE.rglob("*.py")}
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
    known = {one.parts[:2] for _, one in imports_below("qreward_plugins/scheduling") if one.parts}
    assert known.isdisjoint({("samples", "sample"), ("samples", "check"), ("samples", "Sample")}), known
    assert {room for room, *_ in known}.isdisjoint({"judges", "engine"}), known


def test_the_core_knows_no_framework():
    of_ray = ("/sharing/", "/ray_actors", "/replicas/ray_", "/sources/ray_")
    wrong = []
    for path, one in imports_below("qreward_plugins"):
        framework = one.module.split(".")[0]
        allowed = framework == "ray" and one.in_function and any(each in path.as_posix() for each in of_ray)
        if framework in FRAMEWORKS and not allowed:
            wrong.append(f"{path.relative_to(ROOT)}: {one.module}")
    assert wrong == []


def from_the_core(*folders):
    return [(path, one) for path, one in imports_below(*folders) if one.module.startswith("qreward_plugins")]


def test_adapters_import_public_names_only():
    """Those of the package, and of `adapters`, which has none that no adapter takes."""
    found = from_the_core(*ADAPTERS)
    own = {name for name, value in vars(adapters).items() if not (name.startswith("_") or inspect.ismodule(value))}
    own.remove("annotations")
    public = {"qreward_plugins": qreward_plugins.__all__, "qreward_plugins.adapters": own}
    wrong = [f"{path}: {one.module}.{one.name}" for path, one in found if one.name not in public.get(one.module, ())]
    assert wrong == [], "give adapters what they need by qreward_plugins.adapters"
    assert own == {one.name for _, one in found if one.module == "qreward_plugins.adapters"}


def test_recipes_import_nothing_private():
    found = from_the_core("hydra_plugins", "recipes")
    wrong = [f"{path}: {one.module}.{one.name}" for path, one in found if "._" in f"{one.module}.{one.name}"]
    assert wrong == []


def test_every_public_name_is_there_and_knows_its_home():
    for name in qreward_plugins.__all__:
        home = getattr(getattr(qreward_plugins, name), "__module__", "qreward_plugins")
        assert home.startswith("qreward_plugins") or name in ("Event", "Outcome", "Split"), name
        assert name in dir(qreward_plugins)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="RewardEngin"):
        _ = qreward_plugins.RewardEngin


def test_importing_costs_little_and_pulls_in_no_framework():
    """The engine itself needs neither torch nor Ray."""
    program = (
        "import sys, time; start = time.process_time(); import qreward_plugins; print(time.process_time() - start)\n"
        "print([name for name in ('torch', 'ray', 'verl', 'aiohttp') if name in sys.modules])\n"
        "qreward_plugins.RewardEngine; print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    results = [run.stdout.split("\n", 1) for run in runs]
    assert {loaded for _, loaded in results} == {"[]\nFalse False\n"}
    assert min(float(took) for took, _ in results) < 0.3


def test_every_package_says_that_it_is_typed():
    for package in ("qreward_plugins", "verl_adapter", "slime_adapter", "roll_adapter"):
        assert (ROOT / package / "py.typed").is_file()
