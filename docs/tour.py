"""docs/tour.py: keeps docs/tour.md true: its numbers, and the experiments that it proposes.

    python docs/tour.py [NUMBER ...]    # walk, do the experiments, write all that into the page
    python docs/tour.py --compare [STATION ...]    # walk, and print the lines that the page has not
    python docs/tour.py --check      # walk, and say what is not true any more on the page

The page is the only source. What stands behind `<!-- values: NAME -->` is written by walk.py. An
experiment is read from the page, its diff and its commands, and done in a copy of the repository.
Left out: what is followed on the walk (walk.py).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

import torch
from walk import walk

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tour.md"
VALUES = re.compile(r"(<!-- values: (\w+) -->\n```text\n)(.*?)(?=```)", re.DOTALL)
EXPERIMENT = re.compile(
    r"```diff\n--- (\S+)\n(.*?)```\n(?:(?!```).)*?```sh\n(.*?)```\n"
    r"(?:(?!```).)*?</summary>\n\n```text\n(.*?)(?=```)",
    re.DOTALL,
)
INEXACT = re.compile(r"(?<![\w.])-?\d+\.\d+|0x[0-9a-f]+")
VERDICT = re.compile(r"FAILED|ERROR|\d+ (passed|failed)")  # lines of a test run worth keeping
SHOWN = 8  # lines of what a command says


def same(a: str, b: str) -> bool:
    """Whether two lines say the same: numbers with a point up to their last digits, and never
    checksums, for both depend on how a processor rounds."""
    if INEXACT.sub("#", a).split() != INEXACT.sub("#", b).split():
        return False
    pairs = zip(INEXACT.findall(a), INEXACT.findall(b), strict=True)
    pairs = [(x, y, 2 * 10.0 ** -len(x.partition(".")[2])) for x, y in pairs if "0x" not in x + y]
    return all(abs(float(x) - float(y)) <= last + 0.005 * abs(float(x)) for x, y, last in pairs)


def compare(stations: dict, names: list[str], page: str) -> list[str]:
    """Lines of a walk that are not what the page says, each under the page's."""
    found = []
    for _, name, block in VALUES.findall(page):
        if name in (names or [name]):
            pairs = zip_longest(block.splitlines(), stations.get(name, []), fillvalue="")
            differ = [(old, new) for old, new in pairs if not same(old, new)]
            found += [
                f"{name}: {w}: {x}"
                for p in differ
                for w, x in zip(("page", "now "), p, strict=True)
            ]
    if "stopped" in stations:  # nothing else was reached
        return [f"the walk stops: {stations['stopped'][0]}"]
    return found


def read_experiment(match: re.Match) -> tuple[str, str, str, list[str], str]:
    """File, old lines, new lines, commands and output of an experiment on the page."""
    file, diff, commands, output = match.groups()
    old, new = (
        "\n".join(line[1:] for line in diff.splitlines() if line[0] == sign) for sign in "-+"
    )
    return file, old, new, commands.splitlines(), output


def check(page: str, stations: dict) -> list[str]:
    """What is not true any more; experiments are looked at, not done."""
    wrong = compare(stations, [], page)
    if "stopped" in stations:
        return wrong
    experiments = [read_experiment(match) for match in EXPERIMENT.finditer(page)]
    if len(experiments) != page.count("```diff"):
        wrong.append(f"{page.count('```diff')} diffs, but {len(experiments)} whole experiments")
    for file, old, new, _, output in experiments:
        times = f"\n{(ROOT / file).read_text()}".count(f"\n{old}\n")
        if times != 1 or new == old or not output.strip():
            wrong.append(f"{file} has {times} times, and must have once: {old}")
    shown = {name for _, name, _ in VALUES.findall(page)}
    wrong += [f"station {name} is walked or on the page, not both" for name in shown ^ {*stations}]
    rooms = sorted(path.name for path in ROOT.glob("*.py"))
    return wrong + [f"{room} is nowhere linked" for room in rooms if f"](../{room})" not in page]


def experiment(match: re.Match) -> str:
    """Do one experiment in a copy of the repository; returns it with what its commands say."""
    file, old, new, commands, _ = read_experiment(match)
    said = []
    with tempfile.TemporaryDirectory() as folder:
        copy, skip = Path(folder) / "copy", (".*", "runs", "__pycache__", "venv")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*skip))
        text = f"\n{(copy / file).read_text()}"
        assert text.count(f"\n{old}\n") == 1, f"{file} must have this once:\n{old}"
        (copy / file).write_text(text.replace(f"\n{old}\n", f"\n{new}\n")[1:])
        for command in commands:
            words = [sys.executable, *shlex.split(command)[1:]]
            env = os.environ | {"COLUMNS": "300", "PYTHONDONTWRITEBYTECODE": "1"}
            done = subprocess.run(words, cwd=copy, env=env, capture_output=True, text=True)
            lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:]
            last = []
            if "pytest" in words:  # which tests fail, and how many, but not the time
                lines = [re.sub(r"(, \d+ warnings?)? in [\d.]+s.*", "", line) for line in lines]
                lines = [line if len(line) < 100 else line.split(" - ")[0] for line in lines]
                *lines, last = [line for line in lines if VERDICT.match(line)]
                last = [last]
            more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
            said += [f"$ {command}", *(line.rstrip(" :-") for line in lines[:SHOWN]), *more, *last]
    start = match.start(4) - match.start()
    return match[0][:start] + "\n".join(said) + "\n"


def main() -> int:
    torch.set_num_threads(1)
    arguments, stations, page = sys.argv[1:], walk(), PAGE.read_text()
    if arguments[:1] == ["--compare"]:
        print("\n".join(compare(stations, arguments[1:], page)) or "nothing differs from the page")
    elif arguments[:1] == ["--check"]:
        print("\n".join(wrong := check(page, stations)) or "the page is true")
        return len(wrong) > 0
    else:
        assert "stopped" not in stations, stations["stopped"]
        page = VALUES.sub(lambda m: m[1] + "\n".join(stations[m[2]]) + "\n", page)
        PAGE.write_text(page)  # experiments compare with what stands there
        total, number = len(EXPERIMENT.findall(page)), 0

        def do(match: re.Match) -> str:
            nonlocal number
            number += 1
            if arguments and str(number) not in arguments:
                return match[0]
            print(f"experiment {number} of {total}: {match[1]}", flush=True)
            return experiment(match)

        PAGE.write_text(EXPERIMENT.sub(do, page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
