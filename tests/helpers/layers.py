"""The rules of CONTRIBUTING.md on imports and module level, checked on a file's syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

PACKAGE = "moe_framework"

_LEVELS = (
    ("errors",),
    ("distributed",),
    ("precision",),
    ("moe",),
    ("model",),
    ("parallel", "checkpoint", "optim", "data", "observe", "resilience", "planning", "config"),
    ("train",),
    ("tools", "entry"),
)
LEVEL = {layer: level for level, layers in enumerate(_LEVELS) for layer in layers}

# Where each heavy optional dependency may be imported, as prefixes of module names.
HOMES = {
    "transformers": ("tools.benchmarks.train_step.hugging_face",),
    "transformer_engine": (
        "moe_framework.moe.experts.te",
        "moe_framework.precision.recipes",
        "tools.benchmarks.te_peers",
    ),
    "megatron": (
        "moe_framework.checkpoint.megatron",
        "tools.convert_checkpoint",
        "tools.benchmarks.train_step.megatron",
    ),
    "nvidia_resiliency_ext": ("moe_framework.resilience",),
    "tokenizers": ("tools.preparation",),
    "pyarrow": ("tools.preparation",),
}

ENVIRONMENT_READER = "moe_framework.distributed.runtime"
_ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Module:
    """A parsed source file.

    Attributes:
        name: Dotted name, such as `moe_framework.moe.router`, `tools.benchmark` or `train_fsdp2_ep`.
        is_package: Whether it is an `__init__.py`.
        tree: Its syntax tree.
    """

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def layer(self) -> str | None:
        """The layer it belongs to; None for the package's own `__init__`."""
        parts = self.name.split(".")
        if parts[0] == PACKAGE:
            return parts[1] if len(parts) > 1 else None
        return "tools" if parts[0] == "tools" else "entry"


def parse(name: str, source: str, *, is_package: bool = False) -> Module:
    """Parse a file's text."""
    return Module(name, is_package, ast.parse(source))


def layer_violations(module: Module) -> list[str]:
    """Imports of a layer that is not below the module's own."""
    violations = []
    for line, target in imported_names(module):
        parts = target.split(".")
        if parts[0] != PACKAGE or len(parts) == 1 or parts[1] == "__version__":
            continue
        imported = parts[1]
        if imported not in LEVEL:
            violations.append(f"{module.name}:{line}: imports {target}, which is in no known layer")
        elif imported != module.layer and not _is_below(imported, module.layer):
            violations.append(f"{module.name}:{line}: {module.layer} must not import {imported} ({target})")
    if module.layer not in LEVEL and module.layer is not None:
        violations.append(f"{module.name}: {module.layer} is no known layer")
    return violations


def _is_below(imported: str, layer: str | None) -> bool:
    return layer in LEVEL and LEVEL[imported] < LEVEL[layer]


def dependency_violations(module: Module) -> list[str]:
    """Imports of a heavy optional dependency outside its home."""
    return [
        f"{module.name}:{line}: {target} may be imported in {HOMES[root] or 'tests'} only"
        for line, target in imported_names(module)
        if (root := target.split(".")[0]) in HOMES and not _is_home(module.name, HOMES[root])
    ]


def _is_home(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(home + ".") for home in homes)


def environment_violations(module: Module) -> list[str]:
    """Uses of the process environment outside its one reader."""
    if module.name == ENVIRONMENT_READER:
        return []
    violations = []
    aliases = _names_of_os(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            found = _ENVIRONMENT_NAMES & {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found = _ENVIRONMENT_NAMES & {alias.name for alias in node.names}
        else:
            continue
        violations += [f"{module.name}:{node.lineno}: os.{name} outside {ENVIRONMENT_READER}" for name in sorted(found)]
    return violations


def _names_of_os(module: Module) -> set[str]:
    imports = [alias for node in ast.walk(module.tree) if isinstance(node, ast.Import) for alias in node.names]
    renamed = {alias.asname for alias in imports if alias.name == "os" and alias.asname}
    plain = {"os" for alias in imports if alias.name.split(".")[0] == "os" and not alias.asname}
    return renamed | plain


def global_violations(module: Module) -> list[str]:
    """`global` statements."""
    return [f"{module.name}:{n.lineno}: global statement" for n in ast.walk(module.tree) if isinstance(n, ast.Global)]


def import_time_violations(module: Module) -> list[str]:
    """Calls for their effect while the module is imported, such as print."""
    return [
        f"{module.name}:{node.lineno}: work at import: {ast.unparse(node)}"
        for node in _module_level(module.tree.body)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]


def early_torch_violations(module: Module) -> list[str]:
    """Imports of torch when the module is imported, in the modules that must answer without it."""
    if module.layer not in ("config", "errors", "entry"):
        return []
    return [
        f"{module.name}:{node.lineno}: imports {target} at module level"
        for node in _module_level(module.tree.body)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in _targets(module, node)
        if target.split(".")[0] == "torch"
    ]


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything imported anywhere in the file, in functions too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, target) for target in _targets(module, node))


def _targets(module: Module, node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        parts = module.name.split(".")
        ancestors = parts[: len(parts) - node.level + module.is_package]
        base = ".".join([*ancestors, *([base] if base else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def _module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import; not the main guard and not what only a type checker sees."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "__name__ == '__main__'",
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            yield from _module_level(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _module_level(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _module_level(handler.body)
