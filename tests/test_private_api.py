"""Uses of other projects' private parts are known: which files, for which versions, and that they ask first."""

from __future__ import annotations

import ast
import logging
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet

from kernels import private_api
from kernels.private_api import TESTED, PrivateApi, PrivateApiGone, lacking

ROOT = Path(__file__).resolve().parent.parent

TRITON, TORCH, RAY, XGRAMMAR = "Triton 3.6", "torch 2.11 to 2.13", "Ray 2.60.0", "xgrammar 0.2.8"
LEANING = {
    "kernels/runtime/ahead.py": (TRITON,),
    "kernels/runtime/launcher.py": (TRITON,),
    "kernels/linear/w8a8.py": (TORCH,),
    "kernels/mla_decode/fp8_scores.py": (TRITON,),
    "kernels/mla_decode/schedule.py": (TRITON,),
    "kernels/mla_decode/widen.py": (TRITON,),
    "kernels/moe/__init__.py": (TRITON,),
    "kernels/moe/group_sums.py": (TRITON,),
    "kernels/moe/hopper.py": (TRITON,),
    "kernels/moe/four_bit_grouped.py": (TRITON,),
    "kernels/moe/w4a8.py": (TRITON,),
    "kernels/moe/w4a8_products.py": (TRITON,),
    "kernels/moe/w8a8.py": (TRITON,),
    "kernels/runtime/operators.py": (TORCH,),
    "kernels/runtime/repeat.py": (TRITON, TORCH),
    "workers/grammar/quick.py": (XGRAMMAR,),
    "workers/graphs/guard.py": (TRITON,),
    "workers/parallel/symmetric.py": (TORCH,),
    "deploy/cluster/connection.py": (RAY,),
    "deploy/cluster/haproxy.py": (RAY,),
    "deploy/cluster/head_node.py": (RAY,),
    "deploy/cluster/quiet.py": (RAY,),
    "deploy/cluster/ray_address.py": (RAY,),
    "deploy/cluster/replica_ports.py": (RAY,),
    "deploy/cluster/sessions.py": (RAY,),
    "deploy/cluster/spared_pandas.py": (RAY,),
    "deploy/routing/router.py": (RAY,),
    "deploy/serve/application.py": (RAY,),
    "deploy/serve/early_imports.py": (RAY,),
    "deploy/serve/entrance.py": (RAY,),
    "deploy/serve/progress.py": (RAY,),
    "deploy/serve/capacity.py": (RAY,),
    "deploy/serve/under_serve.py": (RAY,),
}
"""Files that use private parts of other projects, and the versions that each was written for. Whoever adds one says in
docs/internals/private-apis.md what happens without."""

_NAMED = re.compile(
    r"\bper_rule_fsms\b|\btriton\.(runtime|backends|compiler|knobs)\b|\bray\.experimental\b|\bJIT(Function|Callable)\b|[\"']_private[\"']"
    r"|\b(torch|triton|ray|uvicorn|starlette|fastapi|pydantic|transformers|tokenizers)(\.\w+)*\._[a-zA-Z]"
)


def private(name: str | None) -> bool:
    return name is not None and name.startswith("_") and not name.endswith("__")


def written(node: ast.Attribute | ast.Constant) -> str:
    """A constant, or a dotted name; of an attribute of something else, which is looked at for itself, the attribute."""
    if isinstance(node, ast.Constant):
        return repr(node.value)
    of = node.value
    return f"{written(of) if isinstance(of, ast.Attribute) else getattr(of, 'id', '')}.{node.attr}"


def leans(source: str) -> list[str]:
    """Return what in a file is private to somebody else: names that begin with an underscore and are not the file's
    own, and modules that are known to be private whatever they are called."""
    nodes = list(ast.walk(ast.parse(source)))
    own = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    ours = ("self", "cls", "super")
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ours}
    found = [_NAMED.search(written(node)) for node in nodes if isinstance(node, (ast.Attribute, ast.Constant))]
    names = [match[0] for match in found if match]
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if _NAMED.search(alias.name) or "._" in alias.name]
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] not in ("kernels", "workers", "deploy", "__future__")
        ):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name for name in imported if _NAMED.search(name) or any(map(private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in own:
            if ast.unparse(node.value).split(".")[0].split("(")[0] not in (*ours, *sys.stdlib_module_names):
                names.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and private(node.arg) and node.arg not in own:
            names.append(f"{node.arg}=")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            of, name = node.args[:2]
            if isinstance(name, ast.Constant) and private(name.value) and name.value not in own:
                names.append(f"{ast.unparse(of)}.{name.value}")
    return names


def test_what_leans_on_private_parts_is_listed() -> None:
    files = [file for package in ("kernels", "workers", "deploy") for file in (ROOT / package).rglob("*.py")]
    found = {str(file.relative_to(ROOT)): leans(file.read_text()) for file in files}
    assert {file: names for file, names in found.items() if names and file not in LEANING} == {}
    assert [file for file in LEANING if not found.get(file)] == []


@pytest.mark.parametrize("file", LEANING)
def test_it_says_for_which_version_it_was_written(file: str) -> None:
    says = " ".join((ast.get_docstring(ast.parse((ROOT / file).read_text())) or "").split())
    assert [version for version in LEANING[file] if version not in says] == []


def test_the_documentation_says_what_happens_without() -> None:
    page = (ROOT / "docs" / "internals" / "private-apis.md").read_text()
    _, _, section = page.partition("\n## Where they are used\n")
    assert [file for file in LEANING if f"`{file}`" not in section] == []


@pytest.mark.parametrize(
    "source",
    [
        "from ray._private import services",
        "def f():\n    import ray.serve._private.replica as replica",
        "from ray.serve.context import _get_global_client",
        "from torch._C._distributed_c10d import Store",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch\ntorch._C._cuda_getCurrentRawStream(0)",
        "from triton.runtime import driver",
        "from triton.backends.nvidia import driver",
        "from triton import JITFunction\nJITFunction.run = None",
        "import triton\ntriton.knobs.runtime.jit_cache_hook = None",
        "from ray.experimental.internal_kv import internal_kv_get_gcs_client",
        "def f(replica):\n    return replica._handle.name",
        "def f(x):\n    return getattr(x, '_receive', None)",
        "from ray import serve\nserve.delete('a', _blocking=False)",
        "NEEDED = 'ray.serve._private.replica.start_asgi_http_server'",
        "import json\njson.loads(grammar.serialize_json())['per_rule_fsms']",
    ],
)
def test_a_new_leaning_is_seen(source: str) -> None:
    assert leans(source)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(1)",
        "class A:\n    def __init__(self):\n        self._x = 1\n\ndef f(a):\n    return a._x",
        "from kernels.runtime.repeat import _stream",
        "import torch.distributed as dist\ndist.TCPStore",
        "def f(x):\n    return x.__class__, getattr(x, '__name__')",
    ],
)
def test_what_is_our_own_or_public_is_left_alone(source: str) -> None:
    assert leans(source) == []


def test_the_tested_versions_are_those_that_are_asked_for() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", requirement).groups() for requirement in asked)
    assert {name: bounds[name] for name in TESTED} == TESTED


def test_the_constraints_are_among_the_tested_versions() -> None:
    exact = dict(re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: exact[name] for name in TESTED if exact[name] not in SpecifierSet(TESTED[name])} == {}


@pytest.fixture
def thing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of another project, and one inside of it."""
    module, inner = ModuleType("thing"), ModuleType("thing._inner")
    module.call = lambda one, two, *, three=3: None  # type: ignore[attr-defined]
    module.number = None  # type: ignore[attr-defined]
    inner.value = 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "thing", module)
    monkeypatch.setitem(sys.modules, "thing._inner", inner)
    monkeypatch.setitem(private_api.TESTED, "thing", ">=1,<2")
    return module


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("thing.number", True),
        ("thing._inner.value", True),
        ("thing.call(one, two)", True),
        ("thing.call(one, three)", True),
        ("thing.call(two, one)", False),
        ("thing.call(four)", False),
        ("thing.number(one)", False),
        ("thing.other", False),
        ("thing._inner.other", False),
        ("thing.number.more", False),
        ("nothing.like.it", False),
    ],
)
def test_what_is_needed_is_looked_up(thing: ModuleType, name: str, there: bool) -> None:
    assert PrivateApi("thing", (name,), "slower").missing() == ("" if there else name)


def test_what_is_missing_is_told_once(thing: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    ground = PrivateApi("thing", ("thing.number", "thing.gone", "thing.call(four)"), "everything is slower")
    assert not ground.there()
    assert not ground.there()
    ground.lost("anything else")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "thing has no thing.gone, thing.call(four): everything is slower"
    with pytest.raises(PrivateApiGone, match=r"thing has no thing\.gone.*everything is slower; install.*'thing>=1,<2'"):
        ground.require()


def test_what_is_there_is_looked_up_once_and_nothing_is_said(
    thing: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    ground = PrivateApi("thing", ("thing.number",), "slower")
    assert ground.there()
    ground.require()
    del thing.number  # type: ignore[attr-defined]
    assert ground.there()
    assert not caplog.records


def test_the_installed_version_is_told() -> None:
    assert re.match(r"torch 2\.1[123]\S* has no x: slower; install", PrivateApi("torch", (), "slower").problem("x"))


def test_attributes_that_a_thing_lacks_are_named() -> None:
    assert lacking(1, ("real", "unreal", "imag", "size")) == "int.unreal, int.size"
