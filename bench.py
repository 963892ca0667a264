"""bench.py: one door to every measurement.

    python bench.py                    # sync against async on three tasks, in 5 minutes
    python bench.py NAME [flags]       # a measurement of this list; NAME --help has its flags
    python bench.py NAME --record      # the same, and its files are copied to results/
    python bench.py episode [TASK ...] # a sample episode of each task, or of your own file
    python bench.py compare RUN RUN    # the curves of runs over each other: compare.png
    python bench.py look RUN           # execute a run again, for a page to look into: look.html
    python bench.py tables             # write docs/measured.md from results/*.json

Without --out and --record a measurement writes into a new folder, runs/NAME-MMDD-HHMMSS/, alone.
"""
# Left out: the measurements themselves (lab/), and training: trainers are run as commands.

import importlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from reward import TASKS, Task, advance, forget, make_task
from runtime.config import TrainingStopped, UserError, parse
from runtime.terminal import fail, open_streams, printable

MEASUREMENTS = {  # name: (room of lab/, minutes on two cores, files, what is measured)
    "race": ("races", 5, "race.json .png, timeline.png", "sync against async (--seeds 5: 8)"),
    "tasks": ("campaigns", 7, "tasks.json, guess_timeline.png", "three tasks with default flags"),
    "agents": ("campaigns", 110, "agents.json", "tasks with turns: credit, critic, several tasks"),
    "staleness": ("campaigns", 3, "staleness.json", "oldest token trained, every bound and swap"),
    "staleness-methods": ("stale", 100, "methods.json", "59 methods to learn from stale data"),
    "replay": ("campaigns", 10, "replay.json", "runs repeated to the same weights"),
    "faults": ("campaigns", 30, "faults.json", "300 faults on purpose: what is lost"),
    "disk": ("campaigns", 25, "disk.json", "run folders damaged, killed or hostile"),
    "smollm2": ("campaigns", 60, "smollm2-cpu.json .png", "published weights learn sums"),
    "gpu": ("gpu", 12, "*.json", "on one GPU: all that it can be asked, in 12 minutes"),
    "decode": ("speed", 3, "decode-cpu or -cuda.json", "a token at long context"),
    "dsa": ("speed", 3, "dsa-cuda.json", "attention kernels, dense and sparse (GPU)"),
    "recipe": ("recipe", 5, "recipe.json", "how a model becomes sparse (--seeds 3: 11)"),
    "lab": ("exact_runs", 1, "lab.json", "exact bias and variance of objectives"),
}


@dataclass(frozen=True)
class NoFlags:
    """A measurement without flags of its own."""


def show_episode(task: Task) -> None:
    """Print a problem, and the environment's replies to its best answers."""
    problem = task.reset(0, "train")
    print(f"\n{task.name}: at most {task.context} tokens, {task.eval_size} problems held out")
    print(f"  prompt  {problem['prompt']!r:.150}")
    answers, states = task.solve(problem), {}
    for turn, answer in enumerate(answers, 1):
        step = advance(task, states, 0, problem, answers[:turn])
        print(f"  answer  {answer!r:.80} -> {step}")
    forget(task, states, 0)


def describe() -> str:
    """The help text: every measurement with its minutes and what it writes."""
    lines = [__doc__, "measurement        minutes  what is measured, and the files it leaves"]
    for name, (_, minutes, files, what) in MEASUREMENTS.items():
        lines.append(f"{name:17}  {minutes:7}  {what}: {files}")
    return "\n".join(lines)


def measure(name: str, arguments: list[str], folder: Path) -> None:
    """Run one measurement; with --record among the arguments its files are copied to results/."""
    from lab.tables import RESULTS, tables_of

    module, minutes, files, what = MEASUREMENTS[name]
    room = importlib.import_module(f"lab.{module}")  # only this one: others need other packages
    text = f"{what}; about {minutes} minutes on two cores\n\n  --record  copy {files} to results/"
    flags = [word for word in arguments if word != "--record"]
    function = getattr(room, f"bench_{name.replace('-', '_')}")
    takes = function.__annotations__.get("config")  # a dataclass of flags, or there are none
    config = parse(text, flags, takes or NoFlags)
    folder = Path(getattr(config, "out", "") or folder)
    function(folder, config) if takes else function(folder)
    if "--record" in arguments:  # before the tables, in case that they cannot be made
        for file in (*folder.glob("*.json"), *folder.glob("*.png")):
            shutil.copy(file, RESULTS)
            print(f"recorded: results/{file.name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text("\n".join(lines := tables_of(folder)) + "\n")
    print(*lines, f"\nwritten: {folder}/", sep="\n")


def main(arguments: list[str]) -> None:
    """The command line; a mistake costs one line and exit code 2."""
    name, *rest = arguments or ["race"]
    open_streams()
    try:
        if name in ("-h", "--help"):
            print(describe())
        elif name in MEASUREMENTS:
            folder = f"{name if arguments else 'bench'}-{time.strftime('%m%d-%H%M%S')}"
            measure(name, rest, Path("runs") / folder)
        elif name == "episode":
            for spec in rest or [name for name in TASKS if name not in ("jsonl", "gym")]:
                show_episode(make_task(spec))
        elif name == "compare":
            from lab.plots import compare

            print(printable(compare(rest)))
        elif name == "look":
            from lab.look import look

            print(printable(look(rest)))
        elif name == "tables" and not rest:
            from lab.tables import write_tables

            print(f"written: {write_tables()}")
        else:
            names = [*MEASUREMENTS, "episode", "compare", "look", "tables"]
            raise UserError(f"{name!r}: must be {', '.join(names)} (--help says what they are)")
    except UserError as error:
        fail(error)
    except TrainingStopped as error:
        raise SystemExit(f"stopped: {printable(str(error))}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main(sys.argv[1:])
