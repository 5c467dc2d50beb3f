"""Packages that only some users need, each brought by an extra of this one."""

from __future__ import annotations

from importlib.util import find_spec

from vlm.config import SettingsError


def require(extra: str, what: str, *modules: str) -> None:
    """Raises ConfigError where one of the modules is missing: `what` needs it, `extra` brings it."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise SettingsError(
            f"{what} needs {' and '.join(missing)}, not installed here: pip install 'vlm-serve[{extra}]'"
        )
