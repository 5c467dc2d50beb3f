"""Groups of commands: whole sentences in their lists, and their help where no command is named."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

from vlm.cli.errors import HelpWanted

_WHOLE = 1000  # characters: no summary is so long


class CommandGroup(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises `HelpWanted` without arguments."""
        if not args and not ctx.resilient_parsing:
            raise HelpWanted(ctx.get_help())
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Wraps summaries where the library would cut them off."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(_WHOLE)) for name, command in found if command]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
