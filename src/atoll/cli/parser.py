"""Argument parser of the ``atoll`` command."""

from __future__ import annotations

import argparse
from pathlib import Path

from atoll.core.version import VERSION


def _path(text: str) -> Path:
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError("a path cannot be empty")
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of all commands; the parsed ``command`` is the command's name."""
    parser = argparse.ArgumentParser(
        prog="atoll", description="Federated self-supervised representation learning."
    )
    parser.add_argument("--version", action="version", version=f"atoll {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(command=name)
        return sub

    def settings(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="train.rounds=20 …"
        )

    run = command("run", "Run a recipe: a preset's name or a TOML file.")
    run.add_argument("recipe", metavar="RECIPE")
    run.add_argument("--out", type=_path, help="the run's folder (default: runs/NAME-seedN)")
    run.add_argument("--resume", action="store_true", help="continue the run in that folder")
    run.add_argument("--restart", action="store_true", help="delete the run in that folder and begin it anew")
    run.add_argument(
        "--reset-client",
        type=int,
        nargs="+",
        action="extend",
        default=[],
        metavar="ID",
        help="with --resume: drop this client's state, which is damaged or lost",
    )
    run.add_argument(
        "--other-environment",
        action="store_true",
        help="with --resume: continue on another kind of CPU or with other libraries; the weights will differ",
    )
    settings(run)

    demo = command("demo", "Train three methods on the same federated digits; takes minutes.")
    demo.add_argument("--out", type=_path, default=Path("runs/demo"))
    settings(demo)

    compare = command("compare", "Run several recipes over several seeds; resumes automatically.")
    compare.add_argument("recipes", nargs="+", metavar="RECIPE")
    compare.add_argument("--seeds", type=int, default=1, help="seeds per recipe (default: 1)")
    compare.add_argument("--out", type=_path, default=Path("runs/compare"))
    compare.add_argument(
        "--methods", nargs="+", default=[], metavar="NAME", help="replace each recipe's method"
    )
    compare.add_argument(
        "--lines", action="store_true", help="add the centralised and the local-only counterparts"
    )
    settings(compare)

    reproduce = command(
        "reproduce",
        "Run a paper's table or figure and compare the results with the paper's; resumes automatically.",
    )
    reproduce.add_argument(
        "table", nargs="?", metavar="TABLE", help="a name or a TOML file (default: list them)"
    )
    reproduce.add_argument("--list", action="store_true", help="list the papers' tables and figures")
    reproduce.add_argument(
        "--dry-run", action="store_true", help="build the rows and show the runs without running them"
    )
    reproduce.add_argument(
        "--rows", nargs="+", default=[], metavar="ROW", help="names or patterns: 'cifar10-*'"
    )
    reproduce.add_argument(
        "--scale",
        default="paper",
        metavar="NAME",
        help="paper (default), or NOT the paper's setting: cpu (minutes a run on two cores), test (seconds)",
    )
    reproduce.add_argument("--seeds", type=int, default=1, help="seeds per row (default: 1)")
    reproduce.add_argument(
        "--out", type=_path, help="folder of the runs (default: runs/TABLE, or runs/TABLE-SCALE)"
    )
    settings(reproduce)

    data = command("data", "Show and draw a recipe's images, their partition and their shifts.")
    data.add_argument("recipe", metavar="RECIPE")
    data.add_argument("-o", "--output", type=Path, metavar="SVG", help="the picture (default: data-NAME.svg)")
    settings(data)

    evaluate = command("evaluate", "Evaluate a finished run's encoder under a named protocol.")
    evaluate.add_argument("run", type=_path, metavar="RUN")
    evaluate.add_argument("--protocol", required=True, metavar="NAME")
    evaluate.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="data.KEY=VALUE", help="use other images"
    )

    detect = command(
        "detect", "Fine-tune an encoder for object detection; measure its precision. Resumes automatically."
    )
    detect.add_argument("encoder", type=_path, metavar="RUN_OR_ENCODER")
    detect.add_argument(
        "data", metavar="DATA", help="a folder of annotated images: COCO's JSON, or Parquet files"
    )
    detect.add_argument("--scratch", action="store_true", help="draw the encoder's weights anew")
    detect.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    detect.add_argument(
        "--out", type=_path, help="folder of the results (default: detection/DATA beside the encoder)"
    )
    detect.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="epochs=12 size=800 masks=true …",
    )
    check = command("check", "Verify all files of a run.")
    check.add_argument("run", type=_path, metavar="RUN")

    embed = command("embed", "Compute and write the representations of images.")
    embed.add_argument("encoder", type=_path, metavar="RUN_OR_ENCODER")
    embed.add_argument("images", type=_path, metavar="IMAGES", help="an image file or a folder of images")
    embed.add_argument("-o", "--output", type=_path, required=True, help=".npz, .csv or .parquet")

    export = command("export", "Convert a run's encoder for other programs.")
    export.add_argument("run", type=_path, metavar="RUN")
    export.add_argument("--format", required=True, metavar="NAME", help="safetensors, pt2 or onnx")
    export.add_argument("-o", "--output", type=_path)

    report = command("report", "Write one page about one or several runs.")
    report.add_argument("runs", nargs="+", type=_path, metavar="RUN")
    report.add_argument(
        "-o",
        "--output",
        type=_path,
        help="the page (default: report.html in the run; for several runs, here)",
    )

    bench = command("bench", "Time a recipe's training step; recommend threads and memory layout.")
    bench.add_argument("recipe", metavar="RECIPE", help="a recipe, or gpu: check and measure Atoll on a GPU")
    bench.add_argument(
        "--out", type=_path, default=Path("bench-gpu.json"), help="for gpu: the JSON file to write"
    )
    bench.add_argument("--device", default="cuda", help="for gpu: the device (default: cuda)")
    bench.add_argument(
        "--scale", choices=("full", "test"), default="full", help="for gpu: the extent of the measurement"
    )
    settings(bench)

    egress = command("egress", "List every tensor that leaves a client, before any training.")
    egress.add_argument("recipe", metavar="RECIPE")
    egress.add_argument(
        "--images", type=int, default=1000, help="training images at the site (default: 1000)"
    )
    egress.add_argument("--json", action="store_true")
    settings(egress)

    federate = commands.add_parser("federate", help="Federations of real sites, over Flower.")
    init = federate.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "init", help="Write the Flower app of a recipe.", description="Write the Flower app of a recipe."
    )
    init.set_defaults(command="federate init")
    init.add_argument("folder", type=_path, metavar="DIR")
    init.add_argument("--recipe", required=True, metavar="RECIPE")
    init.add_argument("--sites", type=int, default=0, help="real sites; 0: shares of the recipe's images")
    init.add_argument("--out", type=_path, help="the run's folder (default: runs/NAME-seedN)")
    init.add_argument("--images", type=_path, help="the coordinator's images for evaluation, by class")
    settings(init)

    schema = command("schema", "Write the JSON schema of recipes, for editors.")
    schema.add_argument("-o", "--output", type=_path, metavar="FILE", help="(default: print it)")

    theory = command(
        "theory", "Check Dec-SSL's theorem and proposition on drawn data; resumes automatically."
    )
    theory.add_argument(
        "--dims", type=int, nargs="+", default=[100, 300], metavar="D", help="dimensions (default: 100 300)"
    )
    theory.add_argument("--seeds", type=int, default=20, help="seeds per dimension (default: 20)")
    theory.add_argument(
        "--samples",
        type=float,
        default=1.0,
        help="samples of each frequent class, in multiples of d (default: 1)",
    )
    theory.add_argument(
        "--out", type=Path, default=Path("theory"), help="folder of theory.json and theory.svg"
    )

    methods = command("methods", "List methods: paper, what leaves a client, client state.")
    methods.add_argument("--json", action="store_true")
    return parser
