"""A caption job from its settings to its exit code."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from llm.request import RequestError
from llm.storage import KvOption, WeightOption
from preprocess.pages import PageLimits
from preprocess.process_memory import steady_memory
from vlm.caption.caption_progress import counted, progress, summary, summary_lines
from vlm.caption.caption_runner import CaptionRun, RunOptions
from vlm.caption.input_documents import DocumentReader
from vlm.caption.inputs import Skipped, check_arguments, find_sources
from vlm.caption.journal import Journal
from vlm.caption.output import STDOUT, Output, opened_output
from vlm.caption.page_answers import EngineGone, PageAnswerer, Start, ask_model
from vlm.caption.presets import PageQuestion
from vlm.caption.remote_pages import RemotePages
from vlm.caption.rows import RowContext
from vlm.caption.stats import RunStats
from vlm.caption.views.formats import Format
from vlm.cli.errors import BAD_INPUT, FAILURE, INTERRUPTED, PARTIAL, CommandError
from vlm.cli.file_names import as_text
from vlm.config import DEFAULT_MODEL, KV_CACHE_MB, EngineName, EngineOptions
from vlm.foreign.engine_choice import takes_transformers
from vlm.model_source import ModelSource
from vlm.pipeline import ChatMessage, Pipeline
from vlm.remote.remote_server import ServerError
from vlm.spec import ModelSpec
from workers.contract.engine_client import EngineUnavailable
from workers.contract.stages import StageUnavailable
from workers.contract.streams import AnswerFailed
from workers.local.page_drawing import PageRenderer

_LARGE_SIDE = 8192  # pixels of a page that gets as many tiles as any
_SAMPLE_BYTES, _SAMPLE_EVERY = 1 << 16, 1 << 22


@dataclass(frozen=True, slots=True)
class CaptionJob:
    inputs: Sequence[str]
    output: Path
    question: PageQuestion
    form: Format | None = None
    options: RunOptions = field(default_factory=RunOptions)
    render_processes: int = 1
    quiet: bool = False
    as_json: bool = False

    @property
    def is_streamed(self) -> bool:
        """Rows go to stdout, and no later run can go on."""
        return str(self.output) == STDOUT


def model_revision(directory: Path, encoder_revision: str) -> str:
    """Which weights answered: the encoder's hash, the small files, and samples of the large ones."""
    digest = hashlib.sha256(encoder_revision.encode())
    for path in sorted(directory.glob("*")):
        if path.suffix not in (".json", ".jinja", ".safetensors"):
            continue
        size = path.stat().st_size
        digest.update(f"{len(path.name)}:{path.name}:{size}:".encode("utf-8", "surrogateescape"))
        with open(path, "rb") as file:
            for start in range(0, size, _SAMPLE_EVERY):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES if path.suffix == ".safetensors" else _SAMPLE_EVERY))
    return digest.hexdigest()[:32]


def engine_options(
    model: str,
    threads: int,
    question: PageQuestion,
    *,
    engine: EngineName = "auto",
    weights: WeightOption = "auto",
    kv: KvOption = "auto",
) -> EngineOptions:
    """The default engine with no more KV cache than the running pages need: more would only keep pages that
    never come again. Two whole contexts at least, for the lines of batch files."""
    model = DEFAULT_MODEL if model == "default" else model
    options = EngineOptions(
        model=model,
        threads=threads,
        engine=engine,
        weights=weights,
        kv=kv,
        max_pixels=question.max_pixels,
    )
    if options.engine == "openai" or takes_transformers(options, ModelSource.parse(model)):
        return options
    spec = ModelSpec.load(options.model, kv=options.kv_storage, max_pixels=options.pixel_cap)
    page_tokens = question.prompt_for(spec, _LARGE_SIDE).num_tokens + question.params.max_tokens
    num_tokens = max(
        (options.max_running + 1) * min(page_tokens, spec.context_length), 2 * spec.context_length
    )
    needed_mb = (spec.kv_bytes(num_tokens) >> 20) + 1
    return replace(options, kv_cache_mb=min(options.kv_cache_mb or KV_CACHE_MB, needed_mb))


def run_job(job: CaptionJob, make_pipeline: Callable[[], Pipeline | RemotePages]) -> dict[str, Any]:
    """The whole command. Returns the summary; raises `CommandError` for every end but a clean one."""
    check_arguments(job.inputs)
    steady_memory()
    try:
        with opened_output(job.output, job.form) as output:
            numbers, examples = asyncio.run(_run(job, output, make_pipeline))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and job.is_streamed:  # its reader has gone
            raise
        at_fault = error.filename if isinstance(error.filename, str) else job.output
        raise CommandError(f"{at_fault}: {error.strerror or 'input/output error'}", FAILURE) from None
    except ServerError as error:
        raise CommandError(error.message, BAD_INPUT if error.is_clients else FAILURE) from None
    except (EngineGone, EngineUnavailable, StageUnavailable) as error:
        raise CommandError(f"{error}{_go_on(job)}", FAILURE) from None
    if not job.quiet:
        print("\n".join(summary_lines(numbers, examples)), file=sys.stderr)
    if job.as_json:
        print(json.dumps(numbers, ensure_ascii=False))
    if not numbers["finished"]:
        raise CommandError(f"stopped with {counted(numbers['pages'], 'page')} done{_go_on(job)}", INTERRUPTED)
    if not numbers["pages"]:
        raise CommandError("the inputs hold no documents")
    if numbers["errors"]:
        raise CommandError(
            f"{numbers['errors']} of {counted(numbers['pages'], 'page')} failed"
            + ("" if job.is_streamed else f"; see {job.output}"),
            PARTIAL,
        )
    return numbers


def _go_on(job: CaptionJob) -> str:
    return "" if job.is_streamed else "; run the same command again to go on"


async def make_run(
    pipeline: Pipeline | RemotePages,
    journal: Journal,
    renderer: PageRenderer,
    question: PageQuestion,
    options: RunOptions,
    start: Start | None = None,
) -> CaptionRun:
    """A run over a pipeline that is started already, or by `start` when a page needs it."""
    if isinstance(pipeline, RemotePages):
        question, name, revision = await pipeline.describe(question)
    else:
        spec = pipeline.spec
        question, name = question.resolved(spec), as_text(spec.name)
        revision = await asyncio.to_thread(model_revision, spec.directory, spec.revision)
    return CaptionRun(
        PageAnswerer(pipeline, journal, start=start) if start else PageAnswerer(pipeline, journal),
        journal,
        DocumentReader(renderer, pipeline.limits, renderer.limits),
        question,
        RowContext(question.digest, question.preset, name, revision),
        options,
    )


async def _run(
    job: CaptionJob, output: Output, make_pipeline: Callable[[], Pipeline | RemotePages]
) -> tuple[dict[str, Any], list[str]]:
    """(the summary, examples of files that are no documents)"""
    pipeline = make_pipeline()
    renderer = PageRenderer(PageLimits(dpi=job.question.dpi), job.render_processes)
    skipped = Skipped()

    async def start() -> None:
        began = time.monotonic()
        await pipeline.start()
        await _check_constraint(pipeline, job.question)
        run.stats.started += time.monotonic() - began  # figures are of captioning

    engine = Start(start)
    run = await make_run(pipeline, output.journal, renderer, job.question, job.options, engine)
    counting = asyncio.create_task(_count_sources(job.inputs, output.files, run.stats))
    try:
        with _Interrupts(run, engine):
            async with progress(run.stats, quiet=job.quiet):
                await run.run(find_sources(job.inputs, skipped, output.files))
    except asyncio.CancelledError:
        run.stop()
    finally:
        counting.cancel()
        await engine.cancel()
        await renderer.close()
        await pipeline.close()
    finished = not run.stopping
    schema = job.question.params.constraint[1] if job.question.params.constraint else ""
    output.finish(schema, is_whole=finished)
    return summary(run.stats, skipped, str(job.output), finished=finished), skipped.examples


async def _check_constraint(pipeline: Pipeline | RemotePages, question: PageQuestion) -> None:
    """One token of a text-only answer: a schema that the engine refuses ends the run, not every page."""
    if question.params.constraint is None:
        return
    messages = [ChatMessage("user", (question.prompt,))]
    try:
        await ask_model(pipeline, "schema-check", messages, replace(question.params, max_tokens=1))
    except (RequestError, AnswerFailed) as error:
        raise CommandError(f"the schema can't be used: {error}") from None


async def _count_sources(inputs: Sequence[str], outputs: Collection[str], stats: RunStats) -> None:
    """Runs ahead of the feed over names only, for the remaining time."""
    sources = find_sources(inputs, outputs=outputs, ordered=False)
    while found := await asyncio.to_thread(lambda: sum(1 for _ in islice(sources, 1000))):
        stats.sources_found += found
    stats.all_found = True


class _Interrupts:
    """The first Ctrl-C finishes the pages under way, the second one drops them. Rows are safe either way."""

    def __init__(self, run: CaptionRun, engine: Start) -> None:
        self._run = run
        self._engine = engine
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._interrupt)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        if self._run.stopping or not self._run.num_under_way or not self._engine.is_done:
            self._run.stop()
            if self._task:
                self._task.cancel()
            return
        self._run.stop()
        print(
            f"\nfinishing {counted(self._run.num_under_way, 'page')}; press Ctrl-C again to stop at once",
            file=sys.stderr,
            flush=True,
        )
