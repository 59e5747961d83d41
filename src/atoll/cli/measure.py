"""Commands that measure and use what was trained."""

from __future__ import annotations

import argparse

from atoll.cli.arguments import Commands, path_of
from atoll.cli.process import say


def add_commands(commands: Commands) -> None:
    """Add the commands and their arguments."""
    evaluate = commands.add(
        _evaluate,
        "evaluate",
        "Evaluate a finished run's encoder under a named protocol.",
        "runs/digits-ssd-seed0 --protocol probe",
    )
    evaluate.add_argument("run", type=path_of, metavar="RUN")
    evaluate.add_argument("--protocol", required=True, metavar="NAME")
    evaluate.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="data.KEY=VALUE", help="use other images"
    )

    detect = commands.add(
        _detect,
        "detect",
        "Fine-tune an encoder for object detection; measure its precision. Resumes automatically.",
        "runs/ssd-seed0 my-images --seeds 3",
    )
    detect.add_argument("encoder", type=path_of, metavar="RUN_OR_ENCODER")
    detect.add_argument(
        "data", metavar="DATA", help="a folder of annotated images: COCO's JSON, or Parquet files"
    )
    detect.add_argument("--scratch", action="store_true", help="start from new random weights")
    detect.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    detect.add_argument(
        "--out", type=path_of, help="folder of the results (default: detection/DATA beside the encoder)"
    )
    detect.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="epochs=12 size=800 masks=true …",
    )

    embed = commands.add(
        _embed,
        "embed",
        "Compute and write the representations of images.",
        "runs/digits-ssd-seed0 photos -o h.npz",
    )
    embed.add_argument("encoder", type=path_of, metavar="RUN_OR_ENCODER")
    embed.add_argument("images", type=path_of, metavar="IMAGES", help="an image file or a folder of images")
    embed.add_argument("-o", "--output", type=path_of, required=True, help=".npz, .csv or .parquet")

    neighbours = commands.add(
        _neighbours,
        "neighbours",
        "Show the nearest images of some images, and measure the encoder without labels.",
        "runs/digits-ssd-seed0",
        "runs/digits-ssd-seed0 photo.png --among photos",
    )
    neighbours.add_argument("run", type=path_of, metavar="RUN")
    neighbours.add_argument(
        "images",
        nargs="?",
        type=path_of,
        metavar="IMAGES",
        help="a file or a folder (default: training images)",
    )
    neighbours.add_argument(
        "--among", type=path_of, metavar="DIR", help="a folder to search (default: the training images)"
    )
    neighbours.add_argument("--queries", type=int, default=8, help="number of images (default: 8)")
    neighbours.add_argument("-k", type=int, default=8, help="neighbours of each (default: 8)")

    export = commands.add(
        _export,
        "export",
        "Convert a run's encoder for other programs.",
        "runs/digits-ssd-seed0 --format onnx",
    )
    export.add_argument("run", type=path_of, metavar="RUN")
    export.add_argument(
        "--format", required=True, metavar="NAME", help="safetensors, pt2, onnx, timm or huggingface"
    )
    export.add_argument("-o", "--output", type=path_of)

    report = commands.add(
        _report, "report", "Write one page about one or several runs.", "runs/*-seed0 -o report.html"
    )
    report.add_argument("runs", nargs="+", type=path_of, metavar="RUN")
    report.add_argument(
        "-o",
        "--output",
        type=path_of,
        help="the page (default: report.html in the run; for several runs, here)",
    )

    check = commands.add(_check, "check", "Verify all files of a run.", "runs/digits-ssd-seed0")
    check.add_argument("run", type=path_of, metavar="RUN")


def _evaluate(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console, results_table
    from atoll.commands.evaluate import evaluate_run
    from atoll.core.run_folder import Run

    results = evaluate_run(Run(options.run).require(), options.protocol, options.set)
    make_console().print(results_table(results))
    return 0


def _detect(options: argparse.Namespace) -> int:
    from atoll.cli.console import PartBar, detection_table, make_console
    from atoll.commands.detect import detect, parse_options, prepare_detection

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


def _embed(options: argparse.Namespace) -> int:
    from atoll.commands.embed import embed_images, save_embeddings
    from atoll.commands.evaluate import find_encoder
    from atoll.models import load_encoder

    names, h = embed_images(load_encoder(find_encoder(options.encoder)), options.images)
    save_embeddings(options.output, names, h)
    print(f"{len(names)} images, {h.shape[1]} dimensions: {options.output}")  # noqa: T201
    return 0


def _neighbours(options: argparse.Namespace) -> int:
    from atoll.cli.console import make_console
    from atoll.commands.neighbours import find_neighbours
    from atoll.core.run_folder import Run
    from atoll.report import write_report
    from atoll.report.neighbours import neighbours_lines

    run = Run(options.run).require()
    record = find_neighbours(run, options.images, options.among, options.queries, options.k)
    console = make_console()
    console.print(neighbours_lines(record))
    report = write_report([run.folder], run.folder / "report.html")
    console.print(f"pictures: {report}#map", highlight=False)
    return 0


def _export(options: argparse.Namespace) -> int:
    from atoll.commands.export import export_run

    print(export_run(options.run, options.format, options.output))  # noqa: T201
    return 0


def _report(options: argparse.Namespace) -> int:
    from atoll.commands.report import report_runs

    print(report_runs(options.runs, options.output))  # noqa: T201
    return 0


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
