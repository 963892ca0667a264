"""bench.py: one door to every measurement.

    python bench.py                    # sync against async on two tasks, in 5 minutes
    python bench.py NAME [flags]       # a measurement of this list; NAME --help has its flags
    python bench.py NAME --record      # the same, and its files are copied to results/
    python bench.py plot RUN ...       # draw the pictures of run folders again
    python bench.py timeline RUN ...   # who did what, these runs in one picture
    python bench.py tables             # write docs/measured.md from results/*.json

A measurement writes into a new folder, runs/NAME-MMDD-HHMMSS/, and nowhere else.
"""
# Left out: the measurements themselves (lab/), and training: trainers are run as commands.

import importlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from runtime.config import UserError, fail, parse

MEASUREMENTS = {  # name: (room of lab/, minutes on two cores, files, what is measured)
    "race": (
        "races",
        5,
        "race.json .png, timeline.png",
        "sync against async (--modes full: 60 minutes)",
    ),
    "tasks": ("campaigns", 7, "tasks.json, guess_*.png", "three tasks with default flags"),
    "staleness": ("campaigns", 3, "staleness.json", "oldest token trained, every bound and swap"),
    "objectives": ("campaigns", 17, "objectives.json", "eight objectives on stale data"),
    "replay": ("campaigns", 10, "replay.json", "runs repeated to the same weights"),
    "faults": ("campaigns", 30, "faults.json", "300 faults on purpose: what is lost"),
    "generator": ("speed", 2, "generator.json", "generation beside transformers"),
    "decode": ("speed", 3, "decode-cpu or -cuda.json", "a token at long context"),
    "dsa": ("speed", 3, "dsa-cuda.json", "attention kernels, dense and sparse (GPU)"),
    "recipe": ("recipe", 5, "recipe.json .png", "how a model becomes sparse (--seeds 3: 11)"),
    "lab": ("exact", 1, "lab.json, lab_*.png", "exact bias and variance of objectives"),
    "simulate": ("simulate", 15, "simulate*.json, .png", "the simulator against real runs"),
    "scale": ("simulate", 10, "scale.json .png", "the simulator on up to 1,024 devices"),
}
FLAGS = {"race": "RaceConfig", "recipe": "RecipeConfig"}  # the classes of their flags


@dataclass(frozen=True)
class NoFlags:
    """A measurement without flags of its own."""


def draw_run(run: Path) -> None:
    """reward.png and timeline.png of a run folder: trainers call this when they end."""
    from lab.plots import draw_run as draw

    draw(run)


def describe() -> str:
    """The help text: every measurement with its minutes and what it writes."""
    lines = [__doc__, "measurement  minutes  what is measured, and the files it leaves"]
    for name, (_, minutes, files, what) in MEASUREMENTS.items():
        lines.append(f"{name:11}  {minutes:7}  {what}: {files}")
    return "\n".join(lines)


def new_folder(name: str) -> Path:
    """Where a measurement writes."""
    return Path("runs") / f"{name}-{time.strftime('%m%d-%H%M%S')}"


def measure(name: str, arguments: list[str], folder: Path) -> None:
    """Run one measurement; with --record among the arguments its files are copied to results/."""
    from lab.plots import RESULTS

    module, minutes, files, what = MEASUREMENTS[name]
    room = importlib.import_module(f"lab.{module}")  # only this one: others need other packages
    text = f"{what}; about {minutes} minutes on two cores\n\n  --record  copy {files} to results/"
    flags = [word for word in arguments if word != "--record"]
    config = parse(text, flags, getattr(room, FLAGS[name]) if name in FLAGS else NoFlags)
    function = getattr(room, f"bench_{name}")
    function(folder, config) if name in FLAGS else function(folder)
    print(f"\nwritten: {folder}/")
    if "--record" in arguments:
        for file in (*folder.glob("*.json"), *folder.glob("*.png")):
            shutil.copy(file, RESULTS)
            print(f"recorded: results/{file.name}")


def draw(command: str, runs: list[Path]) -> None:
    """Draw run folders again, each beside its run, or (timeline) all in one picture."""
    from lab.plots import draw_timeline
    from runtime.runlog import read_lines

    for run in runs:
        trained = any("reward" in row for row in read_lines(run / "metrics.jsonl"))
        if not trained or not (run / "config.json").is_file():
            raise UserError(f"{run}: must be the folder of a run that trained at least one step")
    if command == "timeline":
        picture = new_folder(command) / "timeline.png"
        draw_timeline(runs, picture)
        print(f"written: {picture}")
        return
    for run in runs:
        draw_run(run)
        print(f"written: {run}/reward.png, {run}/timeline.png")


def main(arguments: list[str]) -> None:
    """The command line; a mistake costs one line and exit code 2."""
    name, *rest = arguments or ["race"]
    try:
        if name in ("-h", "--help"):
            print(describe())
        elif name in MEASUREMENTS:
            measure(name, rest, new_folder(name if arguments else "bench"))
        elif name in ("plot", "timeline") and rest:
            draw(name, [Path(run) for run in rest])
        elif name == "tables" and not rest:
            from lab.tables import write_tables

            print(f"written: {write_tables()}")
        else:
            print(describe())
            names = ", ".join(MEASUREMENTS)
            raise UserError(f"{name!r}: must be {names}, plot RUN, timeline RUN or tables")
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main(sys.argv[1:])
