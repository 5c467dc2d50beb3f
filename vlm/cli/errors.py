"""Errors as one line on stderr and an exit code; no traceback unless VLM_DEBUG is set."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from vlm.cli.file_names import one_line

BAD_INPUT, FAILURE, PARTIAL, INTERRUPTED = 2, 1, 3, 130


class CommandError(Exception):
    """Ends a command with a message and an exit code."""

    def __init__(self, message: str, exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class HelpWanted(CommandError):
    """A group of commands was called without one. The message is its help, printed as it is."""


class OneLine(logging.Formatter):
    """Log lines of a command: an exception is named, its traceback shown where VLM_DEBUG is set."""

    def format(self, record: logging.LogRecord) -> str:
        if os.environ.get("VLM_DEBUG"):
            return super().format(record)
        error = record.exc_info[1] if record.exc_info else None
        said = f": {type(error).__name__}: {error}" if error else ""
        return one_line(f"vlm: {record.getMessage()}{said}")


def _exit_code(error: BaseException) -> int:
    """Bad input is 2, a fault of ours 1. Imports late: most commands never fail."""
    from llm.request import RequestError
    from preprocess.types import ImageError

    declared = getattr(error, "exit_code", None)  # ours, and those of the command line library
    if isinstance(declared, int):
        return declared
    if isinstance(
        error, (ImageError, RequestError, ValueError, FileNotFoundError, PermissionError, IsADirectoryError)
    ):
        return BAD_INPUT
    return FAILURE


def _message(error: BaseException) -> str:
    format_message = getattr(error, "format_message", None)  # usage errors of the command line library
    text = format_message() if callable(format_message) else str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if isinstance(error.filename, str) else error.strerror
    if not isinstance(error, CommandError | OSError):  # those name files as they are
        text = " ".join(text.split())
    context = getattr(error, "ctx", None)  # of usage errors: the command that was called wrongly
    hint = f" (see: {context.command_path} --help)" if context else ""
    return one_line(text or type(error).__name__) + hint


def _end_output() -> None:
    """Writes out what stdout still holds, while an error can be told. Raises OSError."""
    if sys.stdout is not None:  # it is where the caller closed it
        sys.stdout.flush()


def _drop_output() -> None:
    """What can't be written is not tried again, with a traceback, as the interpreter ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(command: Callable[[], object]) -> NoReturn:
    """Runs the command line and exits the process, with the code that the command returns if it does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no text
    if sys.stderr is None:  # it is where the caller closed it; None would mean stdout
        sys.stderr = io.StringIO()
    if logging.lastResort is not None:  # what writes where a command sets up no logs
        logging.lastResort.setFormatter(OneLine())
    try:
        try:
            code = command()
        finally:
            _end_output()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        sys.exit(FAILURE)
    except HelpWanted as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if os.environ.get("VLM_DEBUG"):
            raise
        if isinstance(error, OSError):
            _drop_output()
        print(f"vlm: {_message(error)}", file=sys.stderr)
        sys.exit(_exit_code(error))
    if code == INTERRUPTED:  # what the command line library makes of Ctrl-C, too
        print("vlm: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)
