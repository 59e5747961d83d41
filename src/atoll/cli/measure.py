"""Commands that evaluate and use trained encoders."""

from __future__ import annotations

import argparse

from atoll.cli.arguments import Commands, add_run, add_settings, path_of
from atoll.cli.process import say


def add_commands(commands: Commands) -> None:
    """Add the commands and their arguments."""
    _add_evaluate(commands)
    _add_detect(commands)
    _add_embed(commands)
    _add_neighbours(commands)
    _add_export(commands)
    _add_report(commands)
    _add_check(commands)


def _add_evaluate(commands: Commands) -> None:
    evaluate = commands.add(
        _evaluate,
        "evaluate",
        "Evaluate a finished run's encoder under a named protocol.",
        "runs/digits-ssd-seed0 --protocol probe",
    )
    add_run(evaluate)
    evaluate.add_argument(
        "--protocol",
        required=True,
        metavar="NAME",
        help="knn, probe, finetune-10 …; the docs' page on evaluation lists all",
    )
    _device(evaluate, None, "the recipe's engine.device")
    add_settings(evaluate, "evaluate on other images: data.path=DIR …", "data.KEY=VALUE")


def _evaluate(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console, results_table
    from atoll.commands.evaluate import evaluate_run
    from atoll.commands.run_files import keep_if_possible
    from atoll.core.config import describe
    from atoll.core.run_folder import Run
    from atoll.data.options import DataOptions
    from atoll.report import write_report

    run = Run(options.run).require()
    results = evaluate_run(run, options.protocol, options.set, options.device)
    results.pop("fingerprints", None)
    images, usual = results.pop("data", {}), describe(DataOptions())
    chosen = {f"data.{key}": value for key, value in images.items() if value != usual.get(key)}
    make_console().print(results_table(results | chosen))
    keep_if_possible(lambda: write_report([run.folder], run.folder / "report.html"))
    return 0


def _encoder(sub: argparse.ArgumentParser) -> None:
    """Add the encoder."""
    sub.add_argument(
        "encoder", type=path_of, metavar="RUN_OR_ENCODER", help="the folder of a run, or its encoder's file"
    )


def _device(
    sub: argparse.ArgumentParser, default: str | None = "auto", means: str = "a GPU if there is one"
) -> None:
    """Add the device."""
    sub.add_argument(
        "--device", default=default, metavar="NAME", help=f"cpu, cuda, cuda:1 … (default: {means})"
    )


def _add_detect(commands: Commands) -> None:
    detect = commands.add(
        _detect,
        "detect",
        "Fine-tune an encoder for object detection; measure its precision. Resumes automatically.",
        "runs/ssd-seed0 my-images --seeds 3",
    )
    _encoder(detect)
    detect.add_argument(
        "data", metavar="DATA", help="a folder of annotated images: COCO's JSON, or Parquet files"
    )
    detect.add_argument(
        "--scratch", action="store_true", help="start from random weights instead, for comparison"
    )
    detect.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    detect.add_argument(
        "--out", type=path_of, help="folder of the results (default: detection/DATA beside the encoder)"
    )
    add_settings(detect, "set options of the fine-tuning: epochs=12 size=800 masks=true …")


def _detect(options: argparse.Namespace) -> int:
    from atoll.cli.console import detection_table, make_console
    from atoll.commands.detect import detect, parse_options, prepare_detection
    from atoll.commands.progress import PartBar

    console = make_console()
    job = prepare_detection(
        options.encoder,
        options.data,
        parse_options(options.set),
        scratch=options.scratch,
        seeds=options.seeds,
        out=options.out,
    )
    bar = PartBar(console)
    try:
        records = detect(job, bar)
    finally:
        bar.stop()
    console.print(detection_table(records))
    console.print(f"results: {job.out}", highlight=False)
    return 0


def _add_embed(commands: Commands) -> None:
    embed = commands.add(
        _embed,
        "embed",
        "Compute and write the representations of images.",
        "runs/digits-ssd-seed0 photos -o h.npz",
    )
    _encoder(embed)
    embed.add_argument("images", type=path_of, metavar="IMAGES", help="an image file or a folder of images")
    embed.add_argument("-o", "--output", type=path_of, required=True, help=".npz, .csv or .parquet")
    embed.add_argument(
        "--on-corrupt",
        choices=("refuse", "skip"),
        default="refuse",
        help="what to do if an image cannot be read (default: refuse)",
    )
    _device(embed)


def _embed(options: argparse.Namespace) -> int:
    from atoll.commands.embed import check_embeddings, embed_images, save_embeddings
    from atoll.commands.run_files import find_one_encoder
    from atoll.core.text import plural
    from atoll.models import load_encoder

    check_embeddings(options.output)  # before the images are read
    encoder = load_encoder(find_one_encoder(options.encoder))
    names, h = embed_images(encoder, options.images, options.on_corrupt, options.device)
    save_embeddings(options.output, names, h)
    print(f"{plural(len(names), 'image')}, {plural(h.shape[1], 'dimension')}: {options.output}")  # noqa: T201
    return 0


def _add_neighbours(commands: Commands) -> None:
    neighbours = commands.add(
        _neighbours,
        "neighbours",
        "Show the nearest neighbours of images, and measure the encoder without labels.",
        "runs/digits-ssd-seed0",
        "runs/digits-ssd-seed0 photo.png --among photos",
    )
    add_run(neighbours)
    neighbours.add_argument(
        "images",
        nargs="?",
        type=path_of,
        metavar="IMAGES",
        help="the query images: a file or a folder (default: a sample of the searched images)",
    )
    neighbours.add_argument(
        "--among",
        type=path_of,
        metavar="DIR",
        help="a folder of images to search (default: the training images)",
    )
    neighbours.add_argument(
        "--queries", type=int, default=8, help="maximum number of query images (default: 8)"
    )
    neighbours.add_argument("-k", type=int, default=8, help="number of neighbours of each (default: 8)")
    _device(neighbours)
    add_settings(
        neighbours,
        "use other training images, or find them in another place: data.path=DIR …",
        "data.KEY=VALUE",
    )


def _neighbours(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.neighbours import find_neighbours
    from atoll.commands.run_files import keep_if_possible
    from atoll.core.run_folder import Run
    from atoll.report import write_report
    from atoll.report.neighbours import neighbours_lines

    run = Run(options.run).require()
    record = find_neighbours(
        run, options.images, options.among, options.queries, options.k, options.set, options.device
    )
    console = make_console()
    console.print(neighbours_lines(record))
    report = run.folder / "report.html"

    def write() -> None:
        write_report([run.folder], report)
        console.print(f"pictures: {report}#map", highlight=False)

    keep_if_possible(write)
    return 0


def _add_export(commands: Commands) -> None:
    export = commands.add(
        _export,
        "export",
        "Convert a run's encoder for other programs.",
        "runs/digits-ssd-seed0 --format onnx",
    )
    add_run(export)
    export.add_argument(
        "--format", required=True, metavar="NAME", help="safetensors, pt2, onnx, timm or huggingface"
    )
    export.add_argument(
        "-o", "--output", type=path_of, help="file or folder to write (default: in the run's folder)"
    )


def _export(options: argparse.Namespace) -> int:
    from atoll.commands.export import export_run

    print(export_run(options.run, options.format, options.output))  # noqa: T201
    return 0


def _add_report(commands: Commands) -> None:
    report = commands.add(
        _report, "report", "Write one page about one or several runs.", "runs/*-seed0 -o report.html"
    )
    report.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help="folders of runs")
    report.add_argument(
        "-o",
        "--output",
        type=path_of,
        help="the page, .html (default: report.html, in the run's folder or, for several runs, here)",
    )


def _report(options: argparse.Namespace) -> int:
    from atoll.commands.report import report_runs

    print(report_runs(options.runs, options.output))  # noqa: T201
    return 0


def _add_check(commands: Commands) -> None:
    check = commands.add(_check, "check", "Verify all files of a run.", "runs/digits-ssd-seed0")
    add_run(check)


def _check(options: argparse.Namespace) -> int:
    from atoll.commands.check import check_run
    from atoll.core.run_folder import Run

    found = check_run(Run(options.run))
    for sentence in found.damaged:
        say(sentence)
    unverified = ", ".join(str(path.relative_to(options.run)) for path in found.unverified)
    if unverified:
        print(f"without a digest, so not verified (Atoll 0.1 wrote them): {unverified}")  # noqa: T201
    print(f"{options.run}: {found.files} files read, {len(found.damaged)} damaged or missing")  # noqa: T201
    return 2 if found.damaged else 0
