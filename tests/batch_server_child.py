"""A server in a process of its own, to be killed: `batch_server_child.py DATA_DIR PORT LOG`."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn
from caption_child import LoggedEngine
from fake_engine_client import FakeEngine, make_pipeline

from vlm.api.app import create_app
from vlm.config import ServeConfig


def main() -> None:
    data_dir, port, log = sys.argv[1:]
    pipeline = make_pipeline(FakeEngine(token_delay_s=0.01))
    pipeline.engine = LoggedEngine(pipeline.engine, Path(log))
    app = create_app(pipeline, ServeConfig(data_dir=data_dir))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_config=None)


if __name__ == "__main__":
    main()
