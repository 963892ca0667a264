"""docs/tour.py: keeps docs/tour.md true: its values, its code, and the experiments it proposes.

    python docs/tour.py [NUMBER ...]    # walk, do these experiments or all, write it into the page
    python docs/tour.py 0               # the same without any experiment
    python docs/tour.py --compare [STATION ...]    # walk, and print the lines that are different
    python docs/tour.py --check         # walk, and say what on the page is not true any more

The page is the only source. Behind `<!-- values: NAME -->` stands what walk.py has printed, behind
`<!-- code: FILE NAME -->` a function of that file. An experiment is read from the page, its diff
and its commands, and done in a copy of the repository.
Left out: what is followed on the walk (walk.py).
"""

import ast
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
CODE = re.compile(r"(<!-- code: (\S+) (\w+) -->\n```python\n)(.*?)(?=```)", re.DOTALL)
EXPERIMENT = re.compile(
    r"```diff\n--- (\S+)\n(.*?)```\n(?:(?!```).)*?```sh\n(.*?)```\n"
    r"(?:(?!```).)*?</summary>\n\n```text\n(.*?)(?=```)",
    re.DOTALL,
)
LINK = re.compile(r"\]\(([^)#:]+)\)")
INEXACT = re.compile(r"(?<![\w.])-?\d+\.\d+|0x[0-9a-f]+")
VERDICT = re.compile(r"FAILED|ERROR|\d+ (passed|failed)")  # lines of a test run worth keeping
ROOMS = ("*.py", "tasks/*.py", "runtime/*.py", "lab/*.py")
SHOWN = 8  # lines of what a command says


def code_of(file: str, name: str) -> str:
    """The source of a function, without its docstring."""
    source = (ROOT / file).read_text()
    (found,) = [f for f in ast.parse(source).body if getattr(f, "name", "") == name]
    said = found.body[0] if ast.get_docstring(found) else None
    lines = source.splitlines(keepends=True)
    kept = range(found.lineno, found.end_lineno + 1)
    hidden = range(said.lineno, said.end_lineno + 1) if said else ()
    return "".join([lines[n - 1] for n in kept if n not in hidden])


def same(a: str, b: str) -> bool:
    """Whether two lines say the same: numbers with a point up to their last digits, and never
    checksums, for both depend on how a processor rounds."""
    if INEXACT.sub("#", a).split() != INEXACT.sub("#", b).split():
        return False
    for x, y in zip(INEXACT.findall(a), INEXACT.findall(b), strict=True):
        if "0x" in x + y:
            continue
        last_digit = 10.0 ** -len(x.partition(".")[2])
        if abs(float(x) - float(y)) > 2 * last_digit + 0.005 * abs(float(x)):
            return False
    return True


def compare(stations: dict, names: list[str], page: str) -> list[str]:
    """The lines of a walk that are not on the page, each below the page's own line."""
    if "stopped" in stations:  # nothing else was reached
        return [f"the walk stops: {stations['stopped'][0]}"]
    found = []
    for _, name, block in VALUES.findall(page):
        if names and name not in names:
            continue
        for old, new in zip_longest(block.splitlines(), stations.get(name, []), fillvalue=""):
            if not same(old, new):
                found += [f"{name}: page: {old}", f"{name}: now : {new}"]
    return found


def read_experiment(match: re.Match) -> tuple[str, str, str, list[str], str]:
    """File, old lines, new lines, commands and output of an experiment on the page."""
    file, diff, commands, output = match.groups()
    old = "\n".join([line[1:] for line in diff.splitlines() if line[0] == "-"])
    new = "\n".join([line[1:] for line in diff.splitlines() if line[0] == "+"])
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
    for _, file, name, code in CODE.findall(page):
        if code != code_of(file, name):
            wrong.append(f"{file}: {name} is not what the page shows")
    linked = {(PAGE.parent / link).resolve() for link in LINK.findall(page)}
    wrong += [f"{path} is linked, but is not there" for path in linked if not path.exists()]
    rooms = {path for pattern in ROOMS for path in ROOT.glob(pattern)}
    names = [path.relative_to(ROOT) for path in sorted(rooms - linked)]
    return wrong + [f"{name} is nowhere linked" for name in names]


def experiment(match: re.Match) -> str:
    """Do one experiment in a copy of the repository; returns it with what its commands say."""
    file, old, new, commands, _ = read_experiment(match)
    said = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        skip = shutil.ignore_patterns(".*", "runs", "__pycache__", "venv")
        shutil.copytree(ROOT, copy, ignore=skip)
        text = f"\n{(copy / file).read_text()}"
        assert text.count(f"\n{old}\n") == 1, f"{file} must have this once:\n{old}"
        (copy / file).write_text(text.replace(f"\n{old}\n", f"\n{new}\n")[1:])
        for command in commands:
            said += [f"$ {command}", *answer(command, copy)]
    start = match.start(4) - match.start()
    return match[0][:start] + "\n".join(said) + "\n"


def answer(command: str, folder: Path) -> list[str]:
    """What a command says in a folder, shortened: of a test run which tests fail, and how many."""
    words = [sys.executable, *shlex.split(command)[1:]]
    env = os.environ | {"COLUMNS": "300", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:]
    last = []
    if "pytest" in words:
        lines = [re.sub(r"(, \d+ warnings?)? in [\d.]+s.*", "", line) for line in lines]
        lines = [line if len(line) < 100 else line.split(" - ")[0] for line in lines]
        *lines, counts = [line for line in lines if VERDICT.match(line)]
        last = [counts]
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [*[line.rstrip(" :-") for line in lines[:SHOWN]], *more, *last]


def write(stations: dict, page: str, numbers: list[str]) -> None:
    """Write values and code into the page, then what these experiments say (all, if none)."""
    assert "stopped" not in stations, stations["stopped"]
    page = VALUES.sub(lambda m: m[1] + "\n".join(stations[m[2]]) + "\n", page)
    page = CODE.sub(lambda m: m[1] + code_of(m[2], m[3]), page)
    PAGE.write_text(page)  # experiments compare with what stands there
    found = list(EXPERIMENT.finditer(page))
    for number, match in enumerate(found, start=1):
        if not numbers or str(number) in numbers:
            print(f"experiment {number} of {len(found)}: {match[1]}", flush=True)
            page = page.replace(match[0], experiment(match))
    PAGE.write_text(page)


def main() -> int:
    torch.set_num_threads(1)
    arguments, stations, page = sys.argv[1:], walk(), PAGE.read_text()
    if arguments[:1] == ["--compare"]:
        if unknown := {*arguments[1:]} - {*stations}:
            print(f"{', '.join(unknown)}: must be of {', '.join(stations)}", file=sys.stderr)
            return 2
        differ = compare(stations, arguments[1:], page)
        print("\n".join(differ) or "nothing differs from the page")
    elif arguments[:1] == ["--check"]:
        wrong = check(page, stations)
        print("\n".join(wrong) or "the page is true")
        return len(wrong) > 0
    else:
        write(stations, page, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
