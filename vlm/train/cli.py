"""The body of `vlm train`."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from vlm.train.stages import BEST, LAST, STAGES

EXAMPLE = "Example: vlm train --stage join --steps 2000 --out runs/a"


def train_command(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, log.jsonl and the exported model.")],
    stage: Annotated[str, typer.Option(help=f"One of: {', '.join(STAGES)}.")] = "join",
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Hugging Face directory to start from; default: the shipped model."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue the output folder's last checkpoint.")] = False,
    best: Annotated[bool, typer.Option(help="With --resume: continue from its best one.")] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the stage; default: the stage's own.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.0, help="Learning rate; default: the stage's own.")
    ] = None,
    level: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Level the curriculum starts from; 1: the whole domain.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the run's documents.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    bfloat16: Annotated[
        bool, typer.Option(help="Matrix products in 16 bits: faster where the processor has AVX-512 BF16.")
    ] = False,
    evaluate: Annotated[
        int, typer.Option(min=0, help="Documents for the evaluation at the end; 0: none.")
    ] = 0,
) -> None:
    """Train the default model on rendered documents and export its best checkpoint to OUT/export.

    Progress lines name the stage's step, minutes, documents a second, loss, share of characters right in
    legible patches; per kind of document its level, token accuracy and exact match by kind of question.
    """
    import torch

    from vlm.train.drawing.documents import KINDS
    from vlm.train.export import export
    from vlm.train.network import Network
    from vlm.train.prompts import PromptBuilder
    from vlm.train.trainer import Trainer

    if stage not in STAGES:
        raise typer.BadParameter(f"unknown stage; known: {', '.join(STAGES)}", param_hint="--stage")
    torch.set_num_threads(threads)
    source = start or Path(str(files("vlm") / "model"))
    plan = STAGES[stage]
    plan = replace(plan, steps=steps or plan.steps, rate=plan.rate if rate is None else rate)
    builder = PromptBuilder(source)
    trainer = Trainer(Network.load(source), builder, out, seed, bfloat16)
    trainer.progress.levels = dict.fromkeys(KINDS, level)
    if resume:
        checkpoint = out / (BEST if best else LAST)
        if not checkpoint.is_file():
            raise typer.BadParameter("the output folder holds no such checkpoint", param_hint="--resume")
        trainer.resume(checkpoint)
    trainer.run(plan, typer.echo)
    if (out / BEST).is_file():
        trainer.resume(out / BEST)
    export(trainer.averaged(), source, out / "export")
    typer.echo(f"exported the best checkpoint (validation {trainer.progress.best:.3f})")
    if evaluate:
        _evaluate(out / "export", evaluate)


def _evaluate(folder: Path, count: int) -> None:
    from vlm.train.evaluate import evaluate, held_out_documents
    from vlm.train.generate import answerer

    report = evaluate(answerer(folder), held_out_documents(count))
    typer.echo(report.table())


train_command.__doc__ = f"{train_command.__doc__}\n    {EXAMPLE}\n    "
