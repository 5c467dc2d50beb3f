"""`vlm ask`: questions about images, answered in this process or by a running server."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm.request import SamplingParams, Timings, Usage
from vlm.build import build_local_pipeline
from vlm.cli.errors import BAD_INPUT, FAILURE, CommandError
from vlm.cli.images import check_stdin, name_of, naming, read_image
from vlm.config import EngineOptions, ServeConfig
from vlm.pipeline import ChatMessage, ImageFailed, ImageInput, Pipeline
from vlm.remote.chat_body import chat_body, document_part
from vlm.remote.remote_server import RemoteServer, ServerError
from vlm.requests.documents import DocumentPages
from vlm.requests.page_range import ALL, PageRange
from workers.contract.streams import AnswerFailed

MOST_IMAGES = ServeConfig().max_images_per_request


@dataclass(frozen=True, slots=True)
class Reply:
    question: str
    answer: str
    finish_reason: str
    usage: Usage
    timings: Timings

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class BadImage(CommandError):
    """Image number `index` (from 0) can't be decoded."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


def split_arguments(positionals: Sequence[str], questions: Sequence[str]) -> tuple[list[Path], list[str]]:
    """(images, questions): with any -q all positionals are images, else the last one is the question."""
    if questions:
        images = list(positionals)
    else:
        images, questions = list(positionals[:-1]), positionals[-1:]
        if questions and not images:
            raise CommandError(
                'give an image and a question, for example: vlm ask invoice.png "What is the total?"'
            )
    if not images:
        raise CommandError("no image given; accepted formats: JPEG, PNG, WebP, GIF, TIFF, BMP, PDF")
    return [Path(image) for image in images], list(questions)


def _is_text(question: str) -> bool:
    """False for bytes of the command line that are not valid in its encoding."""
    return not any("\ud800" <= character <= "\udfff" for character in question)


async def answer(pipeline: Pipeline, images: Sequence[bytes], question: str, params: SamplingParams) -> Reply:
    """Asks one question about the images, image first, and waits for the whole answer."""
    message = ChatMessage("user", (*(ImageInput(data) for data in images), question))
    return await answer_messages(pipeline, question, [message], params)


async def answer_messages(
    pipeline: Pipeline, question: str, messages: Sequence[ChatMessage], params: SamplingParams
) -> Reply:
    """Waits for the whole answer to `messages`; `question` is what it is printed under."""
    prepared = pipeline.prepare(f"ask-{uuid.uuid4().hex}", messages, params)
    try:
        whole = await pipeline.answer(prepared)
    except AnswerFailed as error:
        raise _as_command_error(error) from None
    reason = whole.choices[0].finish_reason
    return Reply(question, whole.text.strip(), reason, whole.usage, whole.timings)


def _as_command_error(error: AnswerFailed) -> CommandError:
    match error.failure:
        case ImageFailed(code="preprocessing_unavailable" | "internal_error", message=message):
            return CommandError(message, FAILURE)
        case ImageFailed(message=message, image=image):
            return BadImage(message, image)
        case failure:
            return CommandError(failure.message, FAILURE if failure.code == "engine_died" else BAD_INPUT)


async def _ask_all(
    options: EngineOptions,
    images: Sequence[tuple[Path, bytes]],
    questions: Sequence[str],
    params: SamplingParams,
    pages: PageRange,
) -> list[Reply]:
    pipeline = build_local_pipeline(options)
    images = await _pages(images, pages, pipeline)
    for path, data in images:
        with naming(path, data):
            pipeline.plan_image(ImageInput(data))
    await pipeline.start()
    try:
        return [
            await answer(pipeline, [data for _, data in images], question, params) for question in questions
        ]
    except BadImage as error:
        raise CommandError(f"{name_of(images[error.index][0])}: {error}") from None
    finally:
        await pipeline.close()


async def _pages(
    files: Sequence[tuple[Path, bytes]], pages: PageRange, pipeline: Pipeline
) -> list[tuple[Path, bytes]]:
    """Each document as its pages, each page with its file's path. Raises CommandError."""
    found: list[tuple[Path, bytes]] = []
    documents = DocumentPages(pipeline.limits)
    try:
        for path, data in files:
            with naming(path, data, reads_pdfs=True):
                split = await documents.split(data, pages, most=MOST_IMAGES - len(found))
            found += [(path, page) for page in split]
    finally:
        await documents.close()
    return found


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers. max_pixels: of an image that its model takes whole; 0: the server's own."""

    url: str
    model: str | None = None
    max_pixels: int = 0


async def _ask_remotely(
    remote: RunningServer,
    images: Sequence[tuple[Path, bytes]],
    questions: Sequence[str],
    params: SamplingParams,
    pages: str | None,
) -> list[Reply]:
    server = RemoteServer(remote.url)
    replies = []
    try:
        for question in questions:
            body = chat_body([ChatMessage("user", (question,))], params)
            body["messages"][0]["content"][:0] = [document_part(data, pages) for _, data in images]
            if remote.model is not None:
                body["model"] = remote.model
            if remote.max_pixels:
                body["mm_processor_kwargs"] = {"max_pixels": remote.max_pixels}
            whole = await server.answer(body)
            reason = whole.choices[0].finish_reason
            replies.append(Reply(question, whole.text.strip(), reason, whole.usage, whole.timings))
    except ServerError as error:
        raise CommandError(_told(error, images), BAD_INPUT if error.is_clients else FAILURE) from None
    finally:
        await server.close()
    return replies


def _told(error: ServerError, images: Sequence[tuple[Path, bytes]]) -> str:
    """With the image's name where the server names its place."""
    found = re.match(r"messages\[0\]\.content\[(\d+)\]", error.param or "")
    at = int(found[1]) if found else len(images)
    return f"{name_of(images[at][0])}: {error.message}" if at < len(images) else error.message


def stats_line(answer: Reply) -> str:
    usage, timings = answer.usage, answer.timings
    return (
        f"  first token {timings.ttft_ms:.1f} ms (preprocess {timings.preprocess_ms:.1f}, encode "
        f"{timings.encode_ms:.1f}, prefill {timings.prefill_ms:.1f}), {timings.tpot_ms:.2f} ms a token, "
        f"total {timings.total_ms:.1f} ms; {usage.prompt_tokens} prompt tokens, "
        f"{usage.image_tokens} of images, "
        f"{usage.cached_tokens} cached, {usage.completion_tokens} generated"
    )


def ask(
    positionals: Sequence[str],
    questions: Sequence[str],
    answers_by: EngineOptions | RunningServer,
    params: SamplingParams,
    *,
    as_json: bool = False,
    stats: bool = False,
    pages: str | None = None,
) -> None:
    paths, asked = split_arguments(positionals, questions)
    if any(not question.strip() for question in asked):
        raise CommandError("the question is empty")
    if not all(_is_text(question) for question in asked):
        raise CommandError("the question is not valid text in this terminal's encoding")
    check_stdin(paths)
    try:
        wanted = ALL if pages is None else PageRange.parse(pages)
    except ValueError as error:
        raise CommandError(f"--pages {pages}: {error}") from None
    images = [(path, read_image(path)) for path in paths]
    if isinstance(answers_by, RunningServer):
        answers = asyncio.run(_ask_remotely(answers_by, images, asked, params, pages))
    else:
        answers = asyncio.run(_ask_all(answers_by, images, asked, params, wanted))
    if as_json:
        print(json.dumps({"answers": [a.to_json() for a in answers]}, ensure_ascii=False))
        return
    for a in answers:
        print(f"{a.question}\n  {a.answer}" if len(answers) > 1 else a.answer)
        if stats:
            print(stats_line(a), file=sys.stderr if len(answers) == 1 else sys.stdout)
