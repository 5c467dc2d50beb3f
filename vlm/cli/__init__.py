"""The `vlm` command.

Front door: `vlm.cli.main`; nothing heavy is imported before a command needs it.
"""
