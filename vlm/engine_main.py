"""The engine process: `python -m vlm.engine_main --options JSON --fd N`. See
`workers.local.engine_process`."""

from __future__ import annotations

import argparse
import json
import logging
import socket
import sys

from vlm.build import build_any_runner
from vlm.config import EngineOptions
from vlm.settings import from_mapping
from workers.children.process_limits import allow_descriptors
from workers.local.engine_process import Runner, refuse, serve
from workers.local.progress import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--options", required=True, help="EngineOptions as JSON")
    parser.add_argument("--fd", type=int, required=True, help="socket inherited from the serving process")
    parser.add_argument(
        "--progress-fd", type=int, required=True, help="file that the serving process watches progress in"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    options = from_mapping(EngineOptions, json.loads(arguments.options))
    allow_descriptors()
    progress = Progress.of_file(arguments.progress_fd)
    progress.tick()
    with socket.socket(fileno=arguments.fd) as connection:
        try:
            runner: Runner = build_any_runner(options, progress)
        except ValueError as error:
            refuse(connection, str(error))
            sys.exit(2)
        serve(connection, runner, progress)


if __name__ == "__main__":
    main()
